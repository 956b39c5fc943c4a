"""All-reduce in two steps: each rank adds the part that it owns, in order, then pushes the sum.

Part p of the vector belongs to rank p. Both steps are rounds as ``rounds`` describes them (every
block publishes to every peer and waits for every peer), so this kernel shares slots, flags and the
sequence number with ``one_shot``.
"""

import triton
import triton.language as tl

from tp3.kernels.arithmetic import all_ones, narrowed
from tp3.kernels.primitives import vectors_at, words_at
from tp3.kernels.rounds import advance_all, data_of, meet, pulled, push, summed

KIND = tl.constexpr(2)


@triton.jit(do_not_specialize=["flags", "x", "out", "num_vectors", "limit_ns", "page"])
def two_shot_kernel(
    flags: tl.int64,  # address of this rank's flags
    x: tl.int64,  # address of [N]
    out: tl.int64,  # address of [N], written; may be x
    num_vectors: tl.int64,  # 16-byte vectors of x
    limit_ns: tl.int64,
    page: tl.int64,  # address of the host's page
    DTYPE: tl.constexpr,
    OP: tl.constexpr,
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
    """>>> ranks hold [1, 2, 3], [4, 5, 6], [7, 8, 9]: rank 1 adds (2+5)+8; all get [12, 15, 18]"""
    PER_VECTOR: tl.constexpr = 128 // DTYPE.primitive_bitwidth
    SLOT: tl.constexpr = SLOT_BYTES // 16 * PER_VECTOR
    block = tl.program_id(0)
    blocks = tl.num_programs(0)
    lanes = tl.arange(0, LANES)
    first = tl.load(words_at(flags, LAUNCHES) + block)
    sequence = first
    alive = (tl.load(words_at(flags, STICKY)) == 0).to(tl.int32)
    source = vectors_at(x, DTYPE)
    data = data_of(flags, RANK, WORLD)
    part = tl.cdiv(num_vectors, WORLD) * PER_VECTOR
    num = num_vectors * PER_VECTOR
    rounds = tl.cdiv(part, blocks * TILE).to(tl.int32)
    place = block * TILE + tl.arange(0, TILE)
    for turn in range(rounds):
        offsets = (turn * blocks + block).to(tl.int64) * TILE + tl.arange(0, TILE)
        sequence += 1
        slot = (sequence & 1) * SLOT
        mine = offsets < tl.minimum(part, num - RANK * part)
        own = tl.load(source + RANK * part + offsets, mine)
        if alive == 1:
            for r in tl.static_range(WORLD):
                if r != RANK:
                    inside = offsets < tl.minimum(part, num - r * part)
                    tile = tl.load(source + r * part + offsets, inside)
                    push(tile, inside, place, flags, slot, r, RANK, WORLD, SLOT)
            alive = meet(
                flags, block, sequence, lanes, limit_ns, page, KIND, RANK, WORLD, FLAGS, STICKY,
                MAX_BLOCKS, TARGET,
            )  # fmt: skip
        total = summed(own, mine, place, data, slot, OP, DTYPE, RANK, WORLD, SLOT)
        result = narrowed(total, OP, WORLD, DTYPE, TARGET)

        sequence += 1
        slot = (sequence & 1) * SLOT
        if alive == 1:
            for r in tl.static_range(WORLD):
                if r != RANK:
                    push(result, mine, place, flags, slot, r, RANK, WORLD, SLOT)
            alive = meet(
                flags, block, sequence, lanes, limit_ns, page, KIND, RANK, WORLD, FLAGS, STICKY,
                MAX_BLOCKS, TARGET,
            )  # fmt: skip
        for r in tl.static_range(WORLD):
            inside = offsets < tl.minimum(part, num - r * part)
            tile = result
            if r != RANK:
                tile = pulled(inside, place, data, slot, DTYPE, r, RANK, SLOT)
            tile = tl.where(alive == 1, tile, all_ones([TILE], DTYPE))
            tl.store(vectors_at(out, DTYPE) + r * part + offsets, tile, inside)
    if alive == 1:
        advance_all(flags, first, sequence, LAUNCHES, FLAGS, RANK, WORLD, MAX_BLOCKS)
