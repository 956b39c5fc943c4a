"""``grouped_fp8_linear`` for up to 8 rows, on NVIDIA GPUs from sm_90 on; its form is ``few``'s.

The columns of a slab that a warp has share a scale, so each warp multiplies its product of a slab
by one number.

Contract and symbols are those of ``fp8_linear`` with scales of blocks. A unit is 16 columns: one
vector of weights, two of x.
"""

import triton
import triton.language as tl

from tp3.kernels.codecs import dot, e4m3_consecutive, halves
from tp3.kernels.few import COLUMNS
from tp3.kernels.primitives import below, vectors_at
from tp3.kernels.split_k import store_tile

UNITS = tl.constexpr(COLUMNS // 16)  # of a slab, to a warp


@triton.jit
def slab_product(
    words, x, BN: tl.constexpr, BM: tl.constexpr, WARPS: tl.constexpr, TARGET: tl.constexpr
):
    """[WARPS, BN, BM] fp32: each warp's product of one slab.

    words: [4, 8, WARPS, BN/8, 2, 4] uint32, x: [4, 8, WARPS, BM/8, 2, 2, 4]: units of half a warp's
    columns, rows of eight, warps, eights of rows, halves; words of a unit, or its vectors and their
    words.
    """
    # As words up to here: bf16 carried from turn to turn is paired anew, in other pairs.
    even, odd = halves(x)
    x = tl.join(even, odd).reshape([4, 8, WARPS, BM // 8, 2, 2, 2, 4])
    x = x.permute(2, 3, 1, 4, 5, 6, 0, 7).reshape([WARPS, BM, 128])
    low, high = e4m3_consecutive(words, TARGET)
    code0, code1 = halves(low)
    code2, code3 = halves(high)
    values = tl.join(tl.join(code0, code2), tl.join(code1, code3))
    values = values.permute(2, 3, 1, 4, 5, 0, 6, 7).reshape([WARPS, BN, 128])
    return dot(values, x, tl.zeros([WARPS, BN, BM], tl.float32), TARGET)


@triton.jit
def loaded(w_at, x_at, slab, limit, units_at, inside, WARPS: tl.constexpr):
    """A slab's words and x; nothing from unit ``limit`` on."""
    first = slab * (WARPS * UNITS)
    there = below(units_at + first, limit)
    words = tl.load(w_at + first * 4, there[:, :, :, :, :, None], other=0)
    x = tl.load(x_at + first * 8, inside & there[:, :, :, :, :, None, None], other=0)
    return words, x


@triton.jit(
    do_not_specialize=[
        "x", "w", "scales", "y", "x_vectors", "group_vectors", "num_m", "num_n", "num_units",
        "tiles_n", "slabs",
    ]
)  # fmt: skip
def fp8_few_kernel(
    x: tl.int64,  # address of [M, G, K/2] uint32, two bf16 each, M <= BM
    w: tl.int64,  # address of [G, N, K/4] uint32, four codes each
    scales: tl.int64,  # address of fp32 [G, ceil(N/128), ceil(K/128)]
    y: tl.int64,  # address of [M, G, N] bf16, written; PARTIAL: parts of split_k, fp32, written
    x_vectors: tl.int64,  # of 16 bytes, from one row of x to the next
    group_vectors: tl.int64,  # and from one group to the next
    num_m: tl.int64,
    num_n: tl.int64,
    num_units: tl.int64,  # K / 16
    tiles_n: tl.int64,  # of a group
    slabs: tl.int64,  # of a split
    PARTIAL: tl.constexpr,
    EARLY: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    SLAB: tl.constexpr,
    STAGES: tl.constexpr,
    TARGET: tl.constexpr,
):
    """>>> x [1, 2, 0, ...], a row of W 0x38 (1.0), 0xC0 (-2.0), scale 2.0: y = (1 - 4) * 2 = -6"""
    WARPS: tl.constexpr = SLAB // (16 * UNITS)
    tl.static_assert(STAGES == 1)
    units, rows = num_units.to(tl.int32), num_n.to(tl.int32)
    group = tl.program_id(0) // tiles_n.to(tl.int32)
    tile_n = tl.program_id(0) - group * tiles_n.to(tl.int32)
    split = tl.program_id(1)
    # Triton gives dimensions in this order to lanes, to warps and to registers.
    unit = tl.arange(0, 4)[:, None, None, None, None]
    row = tl.arange(0, 8)[None, :, None, None, None]
    warp = tl.arange(0, WARPS)[None, None, :, None, None]
    eight = tl.arange(0, BN // 8)[None, None, None, :, None]
    half = tl.arange(0, 2)[None, None, None, None, :]
    word = tl.arange(0, 4)
    of_warp = warp * UNITS + unit
    at_n = tl.minimum(tile_n * BN + eight * 8 + row, rows - 1).to(tl.int64) + group * num_n
    # What a thread has at fixed distances is added last: they become part of its loads.
    w_at = vectors_at(w, tl.uint32) + (at_n * num_units + of_warp)[:, :, :, :, :, None] * 4
    w_at = w_at + half[:, :, :, :, :, None] * 16 + word
    at_m = tl.arange(0, BM // 8)[None, None, None, :, None] * 8 + row
    inside = (at_m < num_m)[:, :, :, :, :, None, None]
    x_at = at_m.to(tl.int64) * x_vectors + group * group_vectors + of_warp * 2
    x_at = vectors_at(x, tl.uint32) + x_at[:, :, :, :, :, None, None] * 4
    x_at = x_at + half[:, :, :, :, :, None, None] * 32 + tl.arange(0, 2)[:, None] * 4 + word
    columns = tl.cdiv(units, UNITS)  # of scales
    scales_at = scales.to(tl.pointer_type(tl.float32)) + warp
    scales_at += (group * tl.cdiv(rows, 128) + tile_n * BN // 128) * columns
    # As if not in a row, lest lanes take them: each thread needs its warp's.
    scales_at = tl.max_contiguous(scales_at, [1, 1, 1, 1, 1])
    scales_at = tl.broadcast_to(scales_at, [4, 8, WARPS, 1, 1])
    first = split * slabs.to(tl.int32)
    last = tl.minimum(first + slabs.to(tl.int32), tl.cdiv(columns, WARPS))
    acc = tl.zeros([WARPS, BN, BM], tl.float32)
    words, x_slab = loaded(w_at, x_at, first, units, of_warp + half * 4, inside, WARPS)
    for slab in tl.range(first, last, num_stages=1):
        limit = tl.where(slab + 1 < last, units, 0)
        ahead = loaded(w_at, x_at, slab + 1, limit, of_warp + half * 4, inside, WARPS)
        scale = tl.load(scales_at + slab * WARPS, below(slab * WARPS + warp, columns), other=0)
        scale = tl.broadcast_to(scale.permute(2, 3, 1, 0, 4), [WARPS, BN // 8, 8, 4, BM // 4])
        part = slab_product(words, x_slab, BN, BM, WARPS, TARGET)
        acc += part * scale.reshape([WARPS, BN, BM])
        words, x_slab = ahead
    groups = tl.num_programs(0) // tiles_n.to(tl.int32)
    n = tile_n * BN + tl.arange(0, BN)
    m = tl.arange(0, BM)[:, None]
    rows_at, count = (m.to(tl.int64) * groups + group) * num_n, num_m * groups * num_n
    store_tile(
        y, tl.sum(acc, 0), rows_at, m < num_m, n, num_n, count, split, PARTIAL, EARLY, TARGET
    )
