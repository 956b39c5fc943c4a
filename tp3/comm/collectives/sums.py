"""Reduce and reduce-scatter in shared memory, with the all-reduce's sum."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tp3.comm.reduce import Reduction
from tp3.comm.transport.host import HostTransport


def reduce(transport: HostTransport, data: Tensor, reduction: Reduction, root: int) -> None:
    """``data`` [N] of ``root`` becomes the reduction; the others keep theirs."""
    rank, dtype = transport.rank, reduction.view
    step = transport.slot_bytes // dtype.itemsize
    for start in range(0, data.numel(), step):
        piece = data[start : start + step]
        numel = piece.numel()
        parity = transport.next_round()
        if rank != root:
            transport.slot(rank, parity, dtype)[:numel].copy_(piece)
        transport.sync()
        if rank == root:
            terms = [
                piece if r == rank else transport.slot(r, parity, dtype)[:numel]
                for r in range(transport.world_size)
            ]
            reduction.combine(terms, piece)


def reduce_scatter(
    transport: HostTransport, out: Tensor, inputs: Sequence[Tensor], reduction: Reduction
) -> None:
    """``out`` becomes the reduction of everybody's ``inputs[rank]``; the inputs (one per rank) may
    differ in size.

    A slot is divided evenly among the receivers, so the number of rounds follows the largest input
    on every rank.
    """
    rank, world_size, dtype = transport.rank, transport.world_size, reduction.view
    step = transport.slot_bytes // dtype.itemsize // world_size
    for start in range(0, max(part.numel() for part in inputs), step):
        parity = transport.next_round()
        stage = transport.slot(rank, parity, dtype)
        for receiver in transport.peers:
            piece = inputs[receiver][start : start + step]
            stage[receiver * step : receiver * step + piece.numel()].copy_(piece)
        transport.sync()
        target = out[start : start + step]
        if not target.numel():
            continue
        place = slice(rank * step, rank * step + target.numel())
        terms = [
            inputs[rank][start : start + step]
            if r == rank
            else transport.slot(r, parity, dtype)[place]
            for r in range(world_size)
        ]
        reduction.combine(terms, target)
