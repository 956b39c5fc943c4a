"""Reduce and reduce-scatter in shared memory, with the all-reduce's sum."""

from __future__ import annotations

from collections.abc import Sequence

from tp3.comm.reduce import Reduction
from tp3.comm.tensors import Array, chunks
from tp3.comm.transport.host import HostTransport


def reduce(transport: HostTransport, data: Array, reduction: Reduction, root: int) -> None:
    """``data`` [N] of ``root`` becomes the reduction; the others keep theirs."""
    rank, ranks = transport.rank, range(transport.world_size)
    transport.reserve(data.nbytes)
    for piece in chunks(data, transport.slot_bytes // data.itemsize):
        parity = transport.next_round()
        terms = [transport.slot(r, parity, data.dtype)[: piece.size] for r in ranks]
        if rank != root:
            terms[rank][:] = piece
        transport.sync()
        if rank == root:
            terms[rank] = piece
            reduction.combine(terms, piece)


def reduce_scatter(
    transport: HostTransport, out: Array, inputs: Sequence[Array], reduction: Reduction
) -> None:
    """``out`` becomes the reduction of everybody's ``inputs[rank]``; the inputs (one per rank) may
    differ in size.

    A slot is divided evenly among the receivers, so the number of rounds follows the largest input
    on every rank.
    """
    rank, world_size, dtype = transport.rank, transport.world_size, out.dtype
    largest = max(part.size for part in inputs)
    transport.reserve(largest * out.itemsize * world_size)
    step = transport.slot_bytes // out.itemsize // world_size
    for start in range(0, largest, step):
        parity = transport.next_round()
        stage = transport.slot(rank, parity, dtype)
        for receiver in transport.peers:
            piece = inputs[receiver][start : start + step]
            stage[receiver * step : receiver * step + piece.size] = piece
        transport.sync()
        target = out[start : start + step]
        if target.size:
            place = slice(rank * step, rank * step + target.size)
            terms = [transport.slot(r, parity, dtype)[place] for r in range(world_size)]
            terms[rank] = inputs[rank][start : start + step]
            reduction.combine(terms, target)
