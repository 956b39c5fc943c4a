"""Collectives that move data, and messages, through the exchange kernel across processes: every
alignment, uneven and empty messages, more chunks than channels, counts that wrap.
"""

import numpy as np
import torch

from tests.kernels.interpreted import Interpreted, late, layout_of
from tests.kernels.sums import Guarded
from tests.kernels.test_protocol import pattern
from tp3.comm.layout import DeviceLayout

ALIGNMENTS = [16, 8, 4, 2, 1]
WORDS = [1, 2, 4, 16]  # bytes that a kernel moves at once
CHUNK = 64 << 10
START = 2**32 - 3
# Bytes from rank (row) to rank (column), times the alignment: nothing, less and more than a chunk.
SIZES = np.array([[5, 0, 7], [4096, 33, 1], [0, 2, 5000]])
FULL_RINGS = 4 * CHUNK - 16  # two channels of two chunks


class Bytes:
    """What a rank hands to a collective: poisoned outputs and patterned inputs, all guarded."""

    def __init__(self, transport, salt):
        self.rank, self.salt, self.outs = transport.rank, salt, []

    def given(self, receiver, num_bytes, align=16):
        data = pattern(self.rank, receiver, num_bytes, self.salt)
        return Guarded.holding(data, align).view

    def out(self, sender, receiver, num_bytes, align=16):
        made = Guarded(num_bytes, torch.uint8, align)
        self.outs.append((made, pattern(sender, receiver, num_bytes, self.salt)))
        return made.view

    def check(self, label):
        for number, (made, want) in enumerate(self.outs):
            made.check(f"{label}, output {number} of rank {self.rank}", want)


def all_to_all(moves, transport, data, align):
    ranks, me = range(transport.world_size), transport.rank
    gives = [data.given(r, align * SIZES[me, r], align) for r in ranks]
    takes = [data.out(r, me, align * SIZES[r, me], align) for r in ranks]
    moves.all_to_all(transport, takes, gives, 0)


def all_gather(moves, transport, data, align):
    """Sizes that all word sizes share, at addresses of which each rank has its own alignment."""
    own = ALIGNMENTS[(ALIGNMENTS.index(align) + transport.rank) % len(ALIGNMENTS)]
    sizes = [48, CHUNK + 16, 80]
    give = data.given(9, sizes[transport.rank], own)
    takes = [data.out(r, 9, size, own) for r, size in enumerate(sizes)]
    moves.all_gather(transport, takes, give)


def broadcast(moves, transport, data, align):
    root, size = 1, FULL_RINGS
    if transport.rank == root:
        moves.broadcast(transport, data.given(9, size, align), root)
    else:
        moves.broadcast(transport, data.out(root, 9, size, align), root)


def gather_and_scatter(moves, transport, data, align):
    ranks, me, root, size = range(transport.world_size), transport.rank, 2, 37 * align
    takes = [data.out(r, 9, size, align) for r in ranks] if me == root else None
    moves.gather(transport, takes, data.given(9, size, align), root)
    gives = [data.given(r, size, align) for r in ranks] if me == root else None
    moves.scatter(transport, data.out(root, me, size, align), gives, root)


def messages(moves, transport, data, align):
    """Round the ring, first one with more chunks than channels; each has its own tag."""
    me, world_size = transport.rank, transport.world_size
    to, back = (me + 1) % world_size, (me - 1) % world_size
    for tag, size in enumerate((5 * CHUNK + 3 * align, align, 0)):
        moves.send(transport, data.given(to, size, align), to, tag)
        moves.recv(transport, data.out(back, me, size, align), back, tag)


def everything_that_moves(rank, world_size, layout, folder):
    from tp3.comm.collectives import device as moves

    transport, kinds = Interpreted(folder, rank, layout), set()
    transport.max_blocks = 4 * world_size  # two channels
    make = transport.kernel
    transport.kernel = lambda key, how: kinds.add(key) or make(key, how)
    chance = np.random.default_rng(rank)
    calls = [all_to_all, all_gather, broadcast, gather_and_scatter, messages]
    for number, (align, call) in enumerate((a, c) for a in ALIGNMENTS for c in calls):
        if call is broadcast and align in (2, 4, 8):
            continue
        late(chance)
        data = Bytes(transport, number)
        call(moves, transport, data, align)
        label = f"{call.__name__} at multiples of {align}"
        assert not transport.page[1], f"{label}: the kernel reported {transport.page[:32]}"
        data.check(label)
    return sorted(kinds)


def test_everything_that_moves_at_every_alignment(interpreter, tmp_path):
    kinds = [
        ("exchange", table, vector, DeviceLayout.STICKY) for table in (0, 1) for vector in WORDS
    ]
    assert (
        interpreter.ranks(everything_that_moves, layout_of(3), tmp_path, start=START) == [kinds] * 3
    )
