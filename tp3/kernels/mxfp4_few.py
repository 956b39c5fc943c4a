"""``mxfp4_linear`` for up to 8 rows of bf16 x, on NVIDIA GPUs from sm_90 on; its form is ``few``'s.

A weight takes one multiplication. Decoded to 2**-4 of their value all are bf16 numbers for scales
up to 2**5, the smallest subnormal ones included, and the sum is multiplied by 2**4. A block that
meets a larger scale, or NaN, does its sum again with two.

Contract and symbols are those of ``mxfp4_linear``.
"""

import triton
import triton.language as tl

from tp3.kernels.codecs import E2M1_FACTOR_PAIR, dot, e2m1_pair, e8m0_pair, halves, multiplied
from tp3.kernels.primitives import below, vectors_at
from tp3.kernels.split_k import store_tile

SHIFT, UNSHIFTED = tl.constexpr(4), tl.constexpr(2.0**4)
LARGEST_CODE = tl.constexpr(127 + 1 + 4)  # 2**(126 - SHIFT) times its scale is a bf16 number


@triton.jit
def product_of_pairs(a, b, TARGET: tl.constexpr):
    """Two bf16 in a word times two others; the products must be bf16 numbers."""
    if TARGET == "cuda":
        result = tl.inline_asm_elementwise(
            "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.uint32, is_pure=True, pack=1
        )
    else:
        result = multiplied(a, b)
    return result


@triton.jit
def weights_of(words, J: tl.constexpr, factor, TWICE: tl.constexpr, TARGET: tl.constexpr):
    """Pair J of words [..., K], times a factor of each: [..., K, 2] bf16."""
    pair = e2m1_pair(words, J)
    if TWICE:
        pair = product_of_pairs(pair, tl.full(pair.shape, E2M1_FACTOR_PAIR, tl.uint32), TARGET)
    low, high = halves(product_of_pairs(pair, factor, TARGET))
    return tl.join(low, high)


@triton.jit
def factors_of(codes, TWICE: tl.constexpr):
    """What decoded pairs are multiplied by: the scale, or 2**(126 - SHIFT) of it, as a pair."""
    if TWICE:
        factor = e8m0_pair(codes)
    else:
        factor = codes.to(tl.uint32) * 0x00800080 + (126 - SHIFT) * 0x00800080
    return factor


@triton.jit
def slab_products(
    acc, words, codes, x, BN: tl.constexpr, BM: tl.constexpr, WARPS: tl.constexpr,
    TWICE: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """acc [WARPS, BN, BM] fp32 + one slab.

    words: [4, 8, WARPS, BN/8, 4] uint32, codes: [4, 8, WARPS, BN/8], x: [4, 8, WARPS, 4, BM/8, 8]:
    blocks of a warp, rows of eight, warps, eights of rows; words of a block, elements of a word.
    """
    words = words.permute(2, 3, 1, 4, 0).reshape([WARPS, BN, 16])
    factor = factors_of(codes, TWICE).permute(2, 3, 1, 0).reshape([WARPS, BN, 1, 4])
    factor = tl.broadcast_to(factor, [WARPS, BN, 4, 4]).reshape([WARPS, BN, 16])
    # Element 4 h + 2 j1 + j0 of a word is half h of its pair 2 j1 + j0.
    x = x.reshape([4, 8, WARPS, 4, BM // 8, 2, 2, 2])
    x = x.permute(2, 4, 1, 3, 0, 7, 5, 6).reshape([WARPS, BM, 64, 2])
    low, high = tl.split(x)
    for half in tl.static_range(2):
        values = tl.join(
            weights_of(words, 2 * half, factor, TWICE, TARGET),
            weights_of(words, 2 * half + 1, factor, TWICE, TARGET),
        )
        values = values.permute(0, 1, 2, 4, 3).reshape([WARPS, BN, 64])
        acc = dot(values, low if half == 0 else high, acc, TARGET)
    return acc


@triton.jit
def loaded(w_at, scales_at, x_at, slab, limit, blocks_at, inside, WARPS: tl.constexpr):
    """A slab's words, codes and x; nothing from block ``limit`` on."""
    first = slab * (WARPS * 4)
    there = below(blocks_at + first, limit)
    words = tl.load(w_at + first * 4, there[:, :, :, :, None], other=0)
    codes = tl.load(scales_at + first, there, other=0)
    x = tl.load(x_at + first * 32, inside & there[:, :, :, :, None, None], other=0)
    return words, codes, x


@triton.jit
def all_products(
    w_at, scales_at, x_at, first, last, blocks, blocks_at, inside, BN: tl.constexpr,
    BM: tl.constexpr, WARPS: tl.constexpr, TWICE: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """[WARPS, BN, BM] fp32 of slabs first to last - 1, and the largest code among their scales."""
    acc = tl.zeros([WARPS, BN, BM], tl.float32)
    largest = tl.zeros([4, 8, WARPS, BN // 8], tl.int32)
    words, codes, x = loaded(w_at, scales_at, x_at, first, blocks, blocks_at, inside, WARPS)
    for slab in tl.range(first, last, num_stages=1):
        limit = tl.where(slab + 1 < last, blocks, 0)
        ahead = loaded(w_at, scales_at, x_at, slab + 1, limit, blocks_at, inside, WARPS)
        acc = slab_products(acc, words, codes, x, BN, BM, WARPS, TWICE, TARGET)
        largest = tl.maximum(largest, codes.to(tl.int32))
        words, codes, x = ahead
    return acc, largest


@triton.jit(
    do_not_specialize=[
        "x", "w", "scales", "y", "x_vectors", "num_m", "num_n", "num_blocks", "slabs", "splits",
    ]
)  # fmt: skip
def mxfp4_few_kernel(
    x: tl.int64,  # address of [M, K] bf16, rows x_vectors apart
    w: tl.int64,  # address of [N, K/8] uint32, eight codes each
    scales: tl.int64,  # address of [N, K/32] uint8
    y: tl.int64,  # address of [M, N] bf16, written; PARTIAL: parts of split_k, fp32, written
    x_vectors: tl.int64,  # of 16 bytes, from one row of x to the next
    num_m: tl.int64,
    num_n: tl.int64,
    num_blocks: tl.int64,  # K / 32
    slabs: tl.int64,  # of a split
    splits: tl.int64,
    PARTIAL: tl.constexpr,
    EARLY: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    SLAB: tl.constexpr,
    STAGES: tl.constexpr,
    TARGET: tl.constexpr,
):
    """>>> x [1, 1, 0, ...], codes of a row 2 (1.0) and 12 (-2.0), scale 128 (2.0): y = -2.0"""
    WARPS: tl.constexpr = SLAB // 128
    tl.static_assert(STAGES == 1)
    blocks, rows = num_blocks.to(tl.int32), num_n.to(tl.int32)
    tile_m = tl.program_id(1) // splits.to(tl.int32)
    split = tl.program_id(1) - tile_m * splits.to(tl.int32)
    # Triton gives dimensions in this order to lanes, to warps and to registers.
    block = tl.arange(0, 4)[:, None, None, None]
    row = tl.arange(0, 8)[None, :, None, None]
    warp = tl.arange(0, WARPS)[None, None, :, None]
    eight = tl.arange(0, BN // 8)[None, None, None, :]
    blocks_at = warp * 4 + block
    at_n = tl.minimum(tl.program_id(0) * BN + eight * 8 + row, rows - 1).to(tl.int64)
    scales_at = scales.to(tl.pointer_type(tl.uint8)) + at_n * num_blocks + blocks_at
    w_at = (at_n * num_blocks + blocks_at)[:, :, :, :, None] * 4
    w_at = vectors_at(w, tl.uint32) + w_at + tl.arange(0, 4)[None, None, None, None, :]
    word = tl.arange(0, 4)[None, None, None, :, None, None]
    at_m = tl.arange(0, BM // 8)[None, None, None, None, :, None]
    at_m = tile_m * BM + at_m * 8 + row[:, :, :, :, None, None]
    inside = at_m < num_m
    x_at = vectors_at(x, tl.bfloat16) + at_m.to(tl.int64) * (x_vectors * 8) + word * 8
    x_at = x_at + blocks_at[:, :, :, :, None, None] * 32
    x_at = x_at + tl.arange(0, 8)[None, None, None, None, None, :]
    first = split * slabs.to(tl.int32)
    last = tl.minimum(first + slabs.to(tl.int32), tl.cdiv(blocks, WARPS * 4))
    acc, largest = all_products(
        w_at, scales_at, x_at, first, last, blocks, blocks_at, inside, BN, BM, WARPS, False, TARGET
    )
    if tl.max(largest) > LARGEST_CODE:
        acc, largest = all_products(
            w_at, scales_at, x_at, first, last, blocks, blocks_at, inside, BN, BM, WARPS, True,
            TARGET,
        )  # fmt: skip
        acc *= 1 / UNSHIFTED
    total = tl.sum(acc, 0) * UNSHIFTED
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tile_m * BM + tl.arange(0, BM)
    rows_at = m.to(tl.int64)[:, None] * num_n
    inside = (m < num_m)[:, None]
    store_tile(y, total, rows_at, inside, n, num_n, num_m * num_n, split, PARTIAL, EARLY, TARGET)
