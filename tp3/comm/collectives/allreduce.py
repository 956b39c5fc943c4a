"""All-reduce in shared memory. Both algorithms give the same bits: ``Reduction.combine`` over rank
order.

Shapes: N elements, W ranks. Payload a rank writes: one-shot N, two-shot (W-1)/W N + N/W.
"""

from __future__ import annotations

from torch import Tensor

from tp3.comm.layout import split
from tp3.comm.reduce import Reduction
from tp3.comm.tensors import chunks
from tp3.comm.transport.host import HostTransport


def one_shot(transport: HostTransport, data: Tensor, reduction: Reduction) -> None:
    """Everybody publishes everything and sums all of it. ``data`` [N] is reduced in place.

    >>> ranks hold [1, 2], [3, 4], [5, 6]: each computes [(1+3)+5, (2+4)+6] = [9, 12]
    """
    rank, dtype = transport.rank, reduction.view
    step = transport.slot_bytes // dtype.itemsize
    for piece in chunks(data, step):
        pieces = transport.pieces(transport.next_round(), dtype, piece.numel())
        pieces[rank].copy_(piece)
        transport.sync()
        reduction.combine(pieces, piece)


def two_shot(transport: HostTransport, data: Tensor, reduction: Reduction) -> None:
    """Each rank sums the part it owns, then everybody copies the parts. ``data`` [N] is reduced in
    place.

    Two rounds a piece: in the first a rank publishes the parts that others own (its own part never
    leaves it), in the second the sum of its part.

    >>> ranks hold [1, 2, 3], [4, 5, 6], [7, 8, 9]: rank 1 computes (2+5)+8; all get [12, 15, 18]
    """
    rank, world_size, dtype = transport.rank, transport.world_size, reduction.view
    step = transport.slot_bytes // dtype.itemsize
    for piece in chunks(data, step):
        parts = split(piece.numel(), world_size)
        mine = slice(*parts[rank])

        parity = transport.next_round()
        stage = transport.slot(rank, parity, dtype)
        stage[: mine.start].copy_(piece[: mine.start])
        stage[mine.stop : piece.numel()].copy_(piece[mine.stop :])
        transport.sync()
        terms = [
            piece[mine] if r == rank else transport.slot(r, parity, dtype)[mine]
            for r in range(world_size)
        ]

        parity = transport.next_round()
        total = transport.slot(rank, parity, dtype)[mine]
        reduction.combine(terms, total)
        transport.sync()
        for r, (first, last) in enumerate(parts):
            piece[first:last].copy_(transport.slot(r, parity, dtype)[first:last])
