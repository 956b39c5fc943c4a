"""All-reduce, residual add, RMSNorm and FP8 in one kernel: what ``norm`` does with a row, done with
the row's sum before it has left the registers.

The sum is ``sentinel``'s, in rank order, with the same launches, slots and places of elements, so
the two kernels may follow each other in any order: why slot ``k & 1`` is free in launch k is argued
there by launches alone, whatever elements a block of one has. The block of a row needs all of it,
so a block's tile is a row, and the grid follows from rows and width alone.

A row whose data do not come is NaN in all that is written, scales included.
"""

import triton
import triton.language as tl

from tp3.kernels.arithmetic import all_ones
from tp3.kernels.norm import finish_row, row_of
from tp3.kernels.primitives import advance, vectors_at, words_at
from tp3.kernels.rounds import data_of
from tp3.kernels.sentinel import own_bits, push_to_all, total_of

# Up to here residual and weight are loaded before the wait for peers; wider rows lack registers.
EARLY_WIDTH = tl.constexpr(8192)


@triton.jit(
    do_not_specialize=[
        "flags", "x", "residual", "weight", "out", "residual_out", "scale", "rows", "eps_bits",
        "limit_ns", "page",
    ]
)  # fmt: skip
def sentinel_norm_kernel(
    flags: tl.int64,  # address of this rank's flags
    x: tl.int64,  # address of [M, K] bf16
    residual: tl.int64,  # address of [M, K] bf16
    weight: tl.int64,  # address of [K] bf16
    out: tl.int64,  # address of [M, K] bf16 or uint8, written
    residual_out: tl.int64,  # address of [M, K] bf16, written; may be residual
    scale: tl.int64,  # address of [M] or [M, G] fp32, written; 0 without QUANT
    rows: tl.int64,  # M
    eps_bits: tl.int64,  # of an fp32
    limit_ns: tl.int64,
    page: tl.int64,  # address of the host's page
    NAN: tl.constexpr,  # bits of a NaN that is not all ones
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    AHEAD: tl.constexpr,  # rows
    LANES: tl.constexpr,  # threads of a block
    SLOT_BYTES: tl.constexpr,
    BASE: tl.constexpr,  # of the slots in each rank's data
    LAUNCHES: tl.constexpr,
    STICKY: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
    K: tl.constexpr,
    ROW: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    QUANT: tl.constexpr,
    NATIVE: tl.constexpr,
    TARGET: tl.constexpr,
):
    """>>> ranks hold [1, 1], [2, 2], [3, 3]; residual [2, 2], w [1, 2], eps 0:
    each ends with out [1, 2], residual_out [8, 8]
    """
    SLOT: tl.constexpr = SLOT_BYTES // 2
    block = tl.program_id(0)
    blocks = tl.num_programs(0)
    lanes = tl.arange(0, LANES)
    sequence = tl.load(words_at(flags, LAUNCHES) + block) + 1
    alive = (tl.load(words_at(flags, STICKY)) == 0).to(tl.int32)
    slot = BASE // 2 + (sequence & 1) * SLOT
    mine = vectors_at(data_of(flags, RANK, WORLD), tl.int16) + slot
    source = vectors_at(x, tl.int16)
    cols = tl.arange(0, ROW)
    inside = cols < K
    turns = tl.cdiv(rows - block, blocks).to(tl.int32)
    for turn in range(turns + AHEAD):
        if (turn < turns) & (alive == 1):
            offsets = (turn * blocks + block).to(tl.int64) * K + cols
            bits = own_bits(source + offsets, inside, tl.int16, NAN)
            push_to_all(bits, inside, offsets, flags, slot, tl.int16, SLOT, RANK, WORLD)
        if turn >= AHEAD:
            row = ((turn - AHEAD) * blocks + block).to(tl.int64)
            offsets = row * K + cols
            own = own_bits(source + offsets, inside, tl.int16, NAN)
            if ROW <= EARLY_WIDTH:
                beside = row_of(residual, row, K, ROW)
                gain = row_of(weight, row * 0, K, ROW)
            total, alive = total_of(
                own, inside, offsets, mine, alive, flags, limit_ns, page, lanes, sequence, "SUM",
                tl.bfloat16, tl.int16, ROW, SLOT, RANK, WORLD, STICKY, TARGET,
            )  # fmt: skip
            if ROW > EARLY_WIDTH:
                beside = row_of(residual, row, K, ROW)
                gain = row_of(weight, row * 0, K, ROW)
            total = tl.where(alive == 1, total, all_ones([ROW], tl.float32))
            finish_row(
                total, beside, gain, row, out, residual_out, scale, eps_bits, K, ROW, PLUS_ONE,
                QUANT, NATIVE, TARGET,
            )  # fmt: skip
    advance(flags, LAUNCHES, MAX_BLOCKS, sequence)
