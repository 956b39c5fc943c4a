"""All-reduce in shared memory. Both algorithms give the same bits: ``Reduction.combine`` over rank
order.

Shapes: N elements, W ranks. Payload a rank writes: one-shot N, two-shot (W-1)/W N + N/W.
"""

from __future__ import annotations

from itertools import accumulate

from tp3.comm.layout import split
from tp3.comm.reduce import Reduction
from tp3.comm.tensors import Array, chunks
from tp3.comm.transport.host import HostTransport

_SLACK_BYTES = 16 * 8  # of each part: ``split`` rounds up to 16 elements


def one_shot(transport: HostTransport, data: Array, reduction: Reduction) -> None:
    """Everybody publishes everything and sums all of it. ``data`` [N] is reduced in place.

    >>> ranks hold [1, 2], [3, 4], [5, 6]: each computes [(1+3)+5, (2+4)+6] = [9, 12]
    """
    rank, ranks = transport.rank, range(transport.world_size)
    transport.reserve(data.nbytes)
    for piece in chunks(data, transport.slot_bytes // data.itemsize):
        parity = transport.next_round()
        slots = [transport.slot(r, parity, data.dtype)[: piece.size] for r in ranks]
        slots[rank][:] = piece
        transport.sync()
        reduction.combine(slots, piece)


def two_shot(transport: HostTransport, data: Array, reduction: Reduction) -> None:
    """Each rank sums the part it owns, then everybody copies the parts. ``data`` [N] is reduced in
    place.

    Two rounds a piece: in the first a rank publishes the parts that others own, one after another
    (its own part never leaves it), in the second the sum of its part.

    >>> ranks hold [1, 2, 3], [4, 5, 6], [7, 8, 9]: rank 1 computes (2+5)+8; all get [12, 15, 18]
    """
    rank, world_size, dtype = transport.rank, transport.world_size, data.dtype
    others = max(world_size - 1, 1)
    slack = others * _SLACK_BYTES
    transport.reserve(-(-data.nbytes * others // world_size) + slack)
    step = (transport.slot_bytes - slack) // data.itemsize // others * world_size
    for piece in chunks(data, step):
        sizes = split(piece.size, world_size)
        ends = list(accumulate(sizes))
        parts = [piece[end - size : end] for size, end in zip(sizes, ends)]
        first, mine = ends[rank] - sizes[rank], sizes[rank]

        parity = transport.next_round()
        stage = transport.slot(rank, parity, dtype)
        stage[:first] = piece[:first]
        stage[first : piece.size - mine] = piece[ends[rank] :]
        transport.sync()
        terms = [parts[rank]] * world_size
        for sender in transport.peers:
            place = first - (sizes[sender] if sender < rank else 0)
            terms[sender] = transport.slot(sender, parity, dtype)[place : place + mine]

        parity = transport.next_round()
        total = transport.slot(rank, parity, dtype)[:mine]
        reduction.combine(terms, total)
        transport.publish()
        parts[rank][:] = total
        for owner in transport.peers_from_here:
            transport.await_peer(owner)
            parts[owner][:] = transport.slot(owner, parity, dtype)[: sizes[owner]]
