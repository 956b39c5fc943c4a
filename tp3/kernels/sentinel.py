"""All-reduce of float messages without flags: the data say themselves that they have come.

Slots of their own hold all ones (a NaN) wherever nothing has arrived. A sender stores its elements
there, with any all-ones NaN among them replaced by another NaN; a receiver reads until no element
is all ones, and puts the ones back once it has read. So a message costs one trip over the link and
no fence. The idea is Lamport's, as in TensorRT-LLM's low-latency all-reduce.

A block pushes its tiles ``AHEAD`` of those it adds, so that the link carries data while it adds.

Symbols: k sequence number of this kernel's launches, counted apart from those of ``rounds``.

Why slot ``k & 1`` may be written in launch k. Its last user was launch k-2. This rank has ended
launch k-1, in which every peer's data of k-1 came; the peer sent those in its launch k-1, which
began after its launch k-2 had ended, and with it the reading and the putting back of the ones.
A slow peer cannot miss launch k-2's data either: nobody writes them over before k.
"""

import triton
import triton.language as tl

from tp3.kernels.arithmetic import all_ones, folded, narrowed, widened
from tp3.kernels.primitives import (
    TIMED_OUT,
    advance,
    clock,
    must_stop,
    report,
    vectors_at,
    words_at,
)
from tp3.kernels.rounds import data_of

KIND = tl.constexpr(3)


@triton.jit
def own_bits(source, inside, BITS: tl.constexpr, NAN: tl.constexpr):
    """This rank's elements, as they may travel: none is all ones."""
    bits = tl.load(source, inside, other=0)
    return tl.where(bits == -1, NAN, bits).to(BITS)


@triton.jit
def arrived(
    source, inside, alive, flags, limit_ns, page, lanes, sequence, FROM: tl.constexpr,
    STICKY: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """What rank ``FROM`` has pushed, once all of it has come, and whether it has."""
    bits = tl.load(source, inside, other=0, volatile=True)
    waiting = tl.max((bits == -1).to(tl.int32))
    if (waiting == 1) & (alive == 1):
        start = clock(lanes, TARGET)
        turns = 0
        while (waiting == 1) & (alive == 1):
            bits = tl.load(source, inside, other=0, volatile=True)
            waiting = tl.max((bits == -1).to(tl.int32))
            turns += 1
            if waiting == 1:
                alive = 1 - must_stop(turns, start, flags, STICKY, limit_ns, page, lanes, TARGET)
        if alive == 0:
            late = (lanes == FROM).to(tl.int32)
            report(flags, STICKY, page, TIMED_OUT, KIND, sequence, late, lanes)
    return bits, alive


@triton.jit
def push_to_all(
    bits, inside, offsets, flags, slot, BITS: tl.constexpr, SLOT: tl.constexpr, RANK: tl.constexpr,
    WORLD: tl.constexpr,
):  # fmt: skip
    """Store ``bits`` at elements ``offsets`` of this rank's slot at every peer."""
    for r in tl.static_range(WORLD):
        if r != RANK:
            theirs = vectors_at(data_of(flags, r, WORLD), BITS) + slot
            tl.store(theirs + (RANK - (RANK > r)) * 2 * SLOT + offsets, bits, inside)


@triton.jit
def total_of(
    own, inside, offsets, mine, alive, flags, limit_ns, page, lanes, sequence, OP: tl.constexpr,
    DTYPE: tl.constexpr, BITS: tl.constexpr, TILE: tl.constexpr, SLOT: tl.constexpr,
    RANK: tl.constexpr, WORLD: tl.constexpr, STICKY: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """((x0 + x1) + x2) + ... of ``own`` and what comes, wide, with the ones put back; and whether
    all has come.

    mine: pointer to the launch's slot of the first region.
    """
    total = widened(own.to(DTYPE, bitcast=True), DTYPE)
    for r in tl.static_range(WORLD):
        term = own
        if r != RANK:
            here = mine + (r - (r > RANK)) * 2 * SLOT + offsets
            term, alive = arrived(
                here, inside, alive, flags, limit_ns, page, lanes, sequence, r, STICKY, TARGET
            )
            tl.store(here, tl.full([TILE], -1, BITS), inside)
        value = widened(term.to(DTYPE, bitcast=True), DTYPE)
        if r == 0:
            total = value
        else:
            total = folded(total, value, OP)
    return total, alive


@triton.jit(do_not_specialize=["flags", "x", "out", "num_vectors", "limit_ns", "page"])
def sentinel_kernel(
    flags: tl.int64,  # address of this rank's flags
    x: tl.int64,  # address of [N], a float dtype
    out: tl.int64,  # address of [N], written; may be x
    num_vectors: tl.int64,  # 16-byte vectors of x
    limit_ns: tl.int64,
    page: tl.int64,  # address of the host's page
    DTYPE: tl.constexpr,
    BITS: tl.constexpr,  # the integer of DTYPE's width
    NAN: tl.constexpr,  # bits of a NaN that is not all ones
    OP: tl.constexpr,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    TILE: tl.constexpr,  # elements that a block pushes at once
    AHEAD: tl.constexpr,  # tiles
    LANES: tl.constexpr,  # threads of a block
    SLOT_BYTES: tl.constexpr,
    BASE: tl.constexpr,  # of the slots in each rank's data
    LAUNCHES: tl.constexpr,
    STICKY: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
    TARGET: tl.constexpr,
):
    """>>> ranks hold [1, 2], [3, 4], [5, 6]: each ends with [(1+3)+5, (2+4)+6] = [9, 12]"""
    PER_VECTOR: tl.constexpr = 128 // DTYPE.primitive_bitwidth
    SLOT: tl.constexpr = SLOT_BYTES // 16 * PER_VECTOR
    block = tl.program_id(0)
    blocks = tl.num_programs(0)
    lanes = tl.arange(0, LANES)
    sequence = tl.load(words_at(flags, LAUNCHES) + block) + 1
    alive = (tl.load(words_at(flags, STICKY)) == 0).to(tl.int32)
    slot = BASE // 16 * PER_VECTOR + (sequence & 1) * SLOT
    mine = vectors_at(data_of(flags, RANK, WORLD), BITS) + slot
    source = vectors_at(x, BITS)
    num = num_vectors * PER_VECTOR
    tiles = tl.cdiv(num, blocks * TILE).to(tl.int32)
    for turn in range(tiles + AHEAD):
        if (turn < tiles) & (alive == 1):
            offsets = (turn * blocks + block).to(tl.int64) * TILE + tl.arange(0, TILE)
            inside = offsets < num
            bits = own_bits(source + offsets, inside, BITS, NAN)
            push_to_all(bits, inside, offsets, flags, slot, BITS, SLOT, RANK, WORLD)
        if turn >= AHEAD:
            offsets = ((turn - AHEAD) * blocks + block).to(tl.int64) * TILE + tl.arange(0, TILE)
            inside = offsets < num
            own = own_bits(source + offsets, inside, BITS, NAN)
            total, alive = total_of(
                own, inside, offsets, mine, alive, flags, limit_ns, page, lanes, sequence, OP,
                DTYPE, BITS, TILE, SLOT, RANK, WORLD, STICKY, TARGET,
            )  # fmt: skip
            result = narrowed(total, OP, WORLD, DTYPE, TARGET)
            result = tl.where(alive == 1, result, all_ones([TILE], DTYPE))
            tl.store(vectors_at(out, DTYPE) + offsets, result, inside)
    advance(flags, LAUNCHES, MAX_BLOCKS, sequence)
