"""A round of the kernels that count by launch: push into peers' slots, meet, read one's own.

Symbols: W ranks, B blocks, s sequence number. Sender i writes region ``i - (i > j)`` of receiver j;
a region holds two slots.

In a round each block writes its tile into slot ``s & 1`` at its peers, publishes s, waits for every
peer's s, and reads what they pushed. A launch makes as many rounds as its size needs, with numbers
s+1, s+2, ...; the next launch goes on from there, whatever its kernel and grid.

Why slot ``s & 1`` may be written in round s. It was last used in round s-2, and a peer publishes
s-1 only after it has read what it was sent in s-2: in the same launch by the order of its program,
as both rounds give a block the same bytes; in different launches because the one that read s-2 had
ended before the one that publishes s-1 began. This rank has seen s-1 before it writes: in this very
block, or, when s is the first round of its launch, in all blocks of the launch before.

So every block takes part in every round, also one that has no elements left. And no flag stays
behind: now and then a launch also sets those of blocks that it does not have (``advance_all``), or
one that is idle for half of the 32-bit circle would look as if it were ahead.
"""

import triton
import triton.language as tl

from tp3.kernels.arithmetic import folded, widened
from tp3.kernels.primitives import (
    TIMED_OUT,
    advance,
    load_acquire,
    report,
    store_release,
    vectors_at,
    wait,
    words_at,
)


@triton.jit
def data_of(flags, rank, WORLD: tl.constexpr):
    """Address of a rank's data, as this rank sees it."""
    return tl.load(flags.to(tl.pointer_type(tl.int64)) + WORLD + rank)


@triton.jit
def push(
    tile, inside, place, flags, slot, TO: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr,
    SLOT: tl.constexpr,
):  # fmt: skip
    """Store ``tile`` at element ``place`` of this rank's slot at rank ``TO``.

    slot: 0 or ``SLOT``, the number of elements in a slot.
    """
    region = vectors_at(data_of(flags, TO, WORLD), tile.dtype) + (RANK - (RANK > TO)) * 2 * SLOT
    tl.store(region + slot + place, tile, inside)


@triton.jit
def pulled(
    inside, place, data, slot, DTYPE: tl.constexpr, FROM: tl.constexpr, RANK: tl.constexpr,
    SLOT: tl.constexpr,
):  # fmt: skip
    """What rank ``FROM`` has pushed here; past the first-level cache, which keeps old bytes."""
    region = vectors_at(data, DTYPE) + (FROM - (FROM > RANK)) * 2 * SLOT
    return tl.load(region + slot + place, inside, cache_modifier=".cg")


@triton.jit
def meet(
    flags, block, sequence, lanes, limit_ns, page, KIND: tl.constexpr, RANK: tl.constexpr,
    WORLD: tl.constexpr, FLAGS: tl.constexpr, STICKY: tl.constexpr, MAX_BLOCKS: tl.constexpr,
    TARGET: tl.constexpr,
):  # fmt: skip
    """Publish ``sequence`` and wait for every peer's: 1, or 0 once this rank has failed."""
    peer = (lanes < WORLD) & (lanes != RANK)
    bases = tl.load(flags.to(tl.pointer_type(tl.int64)) + lanes, mask=peer, other=0)
    theirs = words_at(bases, FLAGS + 4 * (RANK * MAX_BLOCKS + block))
    arrived = words_at(flags, FLAGS + 4 * block) + lanes * MAX_BLOCKS
    store_release(theirs, sequence, peer, TARGET)
    alive = wait(arrived, sequence, peer, flags, STICKY, limit_ns, page, lanes, TARGET)
    if alive == 0:
        late = peer & (load_acquire(arrived, peer, TARGET) - sequence < 0)
        report(flags, STICKY, page, TIMED_OUT, KIND, sequence, late.to(tl.int32), lanes)
    return alive


@triton.jit
def advance_all(
    flags, first, sequence, OFFSET: tl.constexpr, FLAGS: tl.constexpr, RANK: tl.constexpr,
    WORLD: tl.constexpr, MAX_BLOCKS: tl.constexpr,
):  # fmt: skip
    """End a launch that began after ``first``: set the sequence number; where it crosses a multiple
    of 65536, which all ranks see alike, also the peers' flags of blocks beyond the grid.
    """
    advance(flags, OFFSET, MAX_BLOCKS, sequence)
    if (first ^ sequence) >> 16 != 0:
        blocks = tl.num_programs(0)
        idle = blocks + tl.program_id(0) + blocks * tl.arange(0, MAX_BLOCKS)
        for r in tl.static_range(WORLD):
            if r != RANK:
                theirs = tl.load(flags.to(tl.pointer_type(tl.int64)) + r)
                theirs = words_at(theirs, FLAGS + 4 * RANK * MAX_BLOCKS)
                tl.store(theirs + idle, sequence, mask=idle < MAX_BLOCKS)


@triton.jit
def summed(
    own, inside, place, data, slot, OP: tl.constexpr, DTYPE: tl.constexpr, RANK: tl.constexpr,
    WORLD: tl.constexpr, SLOT: tl.constexpr,
):  # fmt: skip
    """((x0 + x1) + x2) + ... of this rank's ``own`` tile and those pushed here, wide."""
    total = widened(own, DTYPE)
    for r in tl.static_range(WORLD):
        if r == RANK:
            term = own
        else:
            term = pulled(inside, place, data, slot, DTYPE, r, RANK, SLOT)
        if r == 0:
            total = widened(term, DTYPE)
        else:
            total = folded(total, widened(term, DTYPE), OP)
    return total
