"""All-reduce and reduce-scatter in one step: push everything to every peer, add in rank order.

``rounds`` says how a round travels and why its slots may be used again.
"""

import triton
import triton.language as tl

from tp3.kernels.arithmetic import all_ones, narrowed
from tp3.kernels.primitives import vectors_at, words_at
from tp3.kernels.rounds import advance_all, data_of, meet, push, summed

KIND = tl.constexpr(1)


@triton.jit(
    do_not_specialize=["flags", "x", "out", "part_vectors", "num_vectors", "limit_ns", "page"]
)
def one_shot_kernel(
    flags: tl.int64,  # address of this rank's flags
    x: tl.int64,  # address of [part] (all-reduce) or [W, part] (PARTS)
    out: tl.int64,  # address of [part], written; may be x
    part_vectors: tl.int64,  # 16-byte vectors from one part of x to the next
    num_vectors: tl.int64,  # 16-byte vectors of a part
    limit_ns: tl.int64,
    page: tl.int64,  # address of the host's page
    DTYPE: tl.constexpr,
    OP: tl.constexpr,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    TILE: tl.constexpr,  # elements of a block in a round
    LANES: tl.constexpr,  # threads of a block
    SLOT_BYTES: tl.constexpr,
    LAUNCHES: tl.constexpr,
    STICKY: tl.constexpr,
    FLAGS: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
    TARGET: tl.constexpr,
):
    """>>> ranks hold [1, 2], [3, 4], [5, 6]: each ends with [(1+3)+5, (2+4)+6] = [9, 12]"""
    PER_VECTOR: tl.constexpr = 128 // DTYPE.primitive_bitwidth
    SLOT: tl.constexpr = SLOT_BYTES // 16 * PER_VECTOR
    block = tl.program_id(0)
    blocks = tl.num_programs(0)
    lanes = tl.arange(0, LANES)
    first = tl.load(words_at(flags, LAUNCHES) + block)
    sequence = first
    alive = (tl.load(words_at(flags, STICKY)) == 0).to(tl.int32)
    source = vectors_at(x, DTYPE)
    part = part_vectors * PER_VECTOR
    data = data_of(flags, RANK, WORLD)
    rounds = tl.cdiv(num_vectors, blocks * (TILE // PER_VECTOR)).to(tl.int32)
    place = block * TILE + tl.arange(0, TILE)
    for turn in range(rounds):
        sequence += 1
        slot = (sequence & 1) * SLOT
        offsets = (turn * blocks + block).to(tl.int64) * TILE + tl.arange(0, TILE)
        inside = offsets < num_vectors * PER_VECTOR
        own = tl.load(source + PARTS * RANK * part + offsets, inside)
        if alive == 1:
            for r in tl.static_range(WORLD):
                if r != RANK:
                    tile = own
                    if PARTS:
                        tile = tl.load(source + r * part + offsets, inside)
                    push(tile, inside, place, flags, slot, r, RANK, WORLD, SLOT)
            alive = meet(
                flags, block, sequence, lanes, limit_ns, page, KIND, RANK, WORLD, FLAGS, STICKY,
                MAX_BLOCKS, TARGET,
            )  # fmt: skip
        total = summed(own, inside, place, data, slot, OP, DTYPE, RANK, WORLD, SLOT)
        result = narrowed(total, OP, WORLD, DTYPE, TARGET)
        result = tl.where(alive == 1, result, all_ones([TILE], DTYPE))
        tl.store(vectors_at(out, DTYPE) + offsets, result, inside)
    if alive == 1:
        advance_all(flags, first, sequence, LAUNCHES, FLAGS, RANK, WORLD, MAX_BLOCKS)
