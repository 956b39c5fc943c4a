"""y = x W^T with W in MXFP4: e2m1 codes in blocks of 32 that share an e8m0 scale.

Contract: any M and N, K any multiple of 32. Nothing beyond K or N is read: the last slab of a row
is bounded, and rows beyond N are not those of a neighbour but row N - 1 again. Weights are decoded
in registers and never written out. Bound by memory at small M: K is then split over blocks, by the
shape alone, and the parts are added in order (``split_k``).

Symbols: M rows of x, N rows of W, K columns; a slab is what one turn takes of K.
"""

import torch
import triton
import triton.language as tl

from tp3.kernels import few, mxfp4_few
from tp3.kernels.codecs import (
    dot,
    e2m1_values,
    e4m3_values,
    e8m0_pair,
)
from tp3.kernels.operands import (
    E4M3,
    check,
    check_scaled,
    fixed,
    rows_of,
    same_device,
    start,
    target_of,
)
from tp3.kernels.primitives import below, vectors_at
from tp3.kernels.split_k import combined, parts_for, store_tile
from tp3.kernels.tiles import Tile, Tiles

BLOCK = 32  # codes that share a scale

TILES = Tiles(
    nvidia={
        16: Tile(n=64, m=16, slab=256, warps=4, stages=3),
        64: Tile(n=64, m=64, slab=128, warps=4, stages=4),
    },
    amd={
        16: Tile(n=64, m=16, slab=128, warps=4, stages=2),
        64: Tile(n=128, m=64, slab=128, warps=8, stages=2),
    },
    blocks=528,
)


@triton.jit
def slab_product(acc, words, codes, x, X_FP8: tl.constexpr, TARGET: tl.constexpr):
    """acc [BN, BM] fp32 + one slab of W x^T.

    words: [BN, SLAB/8] uint32. codes: [BN, SLAB/32] uint8, the scales. x: [BM, SLAB] bf16, or
    [BM, SLAB/4] uint32 of four e4m3. The order of k is ours to choose: as below, the words that a
    thread multiplies on an NVIDIA GPU lie together and share a scale.
    """
    BN: tl.constexpr = words.shape[0]
    BM: tl.constexpr = x.shape[0]
    GROUPS: tl.constexpr = words.shape[1] // 16  # of four blocks of four words
    words = words.reshape([BN, GROUPS, 4, 4]).permute(0, 1, 3, 2).reshape([BN, GROUPS * 16])
    scale = e8m0_pair(codes).reshape([BN, GROUPS, 4])[:, :, None, :]
    scale = tl.broadcast_to(scale, [BN, GROUPS, 4, 4]).reshape([BN, GROUPS * 16])
    if X_FP8:
        x = x.reshape([BM, GROUPS, 4, 4, 2]).permute(0, 1, 3, 2, 4).reshape([BM, GROUPS * 32])
        first = e4m3_values(x, 0, TARGET).reshape([BM, GROUPS * 32, 2])  # of 4 k: 0, 2
        second = e4m3_values(x, 1, TARGET).reshape([BM, GROUPS * 32, 2])  # 1, 3
        x = tl.join(first, second).permute(0, 1, 3, 2)
    else:
        x = x.reshape([BM, GROUPS, 4, 4, 2, 2, 2]).permute(0, 1, 3, 2, 4, 6, 5)
        x = x.reshape([BM, GROUPS * 32, 2, 2])
    # Half of the values at a time: all of them would take the registers of another block.
    low, high = tl.split(x)
    for half in tl.static_range(2):
        values = tl.join(
            e2m1_values(words, 2 * half, scale, TARGET),
            e2m1_values(words, 2 * half + 1, scale, TARGET),
        )
        part = low if half == 0 else high
        acc = dot(
            values.permute(0, 2, 1).reshape([BN, GROUPS * 64]),
            part.permute(0, 2, 1).reshape([BM, GROUPS * 64]),
            acc,
            TARGET,
        )
    return acc


@triton.jit
def mxfp4_product(
    w_rows, scale_rows, x_rows, x_inside, blocks, first, last, X_FP8: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, SLAB: tl.constexpr, STAGES: tl.constexpr,
    TARGET: tl.constexpr,
):  # fmt: skip
    """[BN, BM] fp32: W x^T over slabs first to last - 1.

    w_rows: pointers [BN, 1] to uint32. scale_rows: to uint8. x_rows: [BM, 1] to bf16, or uint32 of
    e4m3. x_inside: [BM, 1]. blocks: of 32 in a row.
    """
    PER_X: tl.constexpr = 8 if X_FP8 else 32  # elements of x_rows in a block
    words_at = tl.arange(0, SLAB // 8)[None, :]
    codes_at = tl.arange(0, SLAB // 32)[None, :]
    x_at = tl.arange(0, SLAB // 32 * PER_X)[None, :]
    acc = tl.zeros([BN, BM], tl.float32)
    for slab in tl.range(first, last, num_stages=STAGES):
        # Too narrow for Triton's pipeline, so asked for before the others are waited for.
        at = slab * (SLAB // 32) + codes_at
        codes = tl.load(scale_rows + at, below(at, blocks), other=0)
        at = slab * (SLAB // 8) + words_at
        words = tl.load(w_rows + at, below(at, blocks * 4), other=0)
        at = slab * (SLAB // 32 * PER_X) + x_at
        x = tl.load(x_rows + at, x_inside & below(at, blocks * PER_X), other=0)
        acc = slab_product(acc, words, codes, x, X_FP8, TARGET)
    return acc


@triton.jit(
    do_not_specialize=[
        "x", "x_scale", "w", "scales", "y", "x_vectors", "num_m", "num_n", "num_blocks", "slabs",
        "splits",
    ]
)  # fmt: skip
def mxfp4_linear_kernel(
    x: tl.int64,  # address of [M, K] bf16 or e4m3, rows x_vectors apart
    x_scale: tl.int64,  # X_FP8: address of [M] fp32
    w: tl.int64,  # address of [N, K/8] uint32, eight codes each
    scales: tl.int64,  # address of [N, K/32] uint8
    y: tl.int64,  # address of [M, N] bf16, written; PARTIAL: parts of split_k, fp32, written
    x_vectors: tl.int64,  # of 16 bytes, from one row of x to the next
    num_m: tl.int64,
    num_n: tl.int64,
    num_blocks: tl.int64,  # K / 32
    slabs: tl.int64,  # of a split
    splits: tl.int64,
    X_FP8: tl.constexpr,
    PARTIAL: tl.constexpr,
    EARLY: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    SLAB: tl.constexpr,
    STAGES: tl.constexpr,
    TARGET: tl.constexpr,
):
    """>>> x [1, 1, 0, ...], codes of a row 2 (1.0) and 12 (-2.0), scale 128 (2.0): y = -2.0"""
    X_TYPE: tl.constexpr = tl.uint32 if X_FP8 else tl.bfloat16
    PER_VECTOR: tl.constexpr = 128 // X_TYPE.primitive_bitwidth
    blocks = num_blocks.to(tl.int32)
    split = (tl.program_id(1) % splits).to(tl.int32)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = (tl.program_id(1) // splits).to(tl.int32) * BM + tl.arange(0, BM)
    row = tl.minimum(n, num_n - 1).to(tl.int64)[:, None]
    inside = (m < num_m)[:, None]
    first = split * slabs.to(tl.int32)
    last = tl.minimum(first + slabs.to(tl.int32), tl.cdiv(blocks, SLAB // 32))
    acc = mxfp4_product(
        vectors_at(w, tl.uint32) + row * (num_blocks * 4),
        scales.to(tl.pointer_type(tl.uint8)) + row * num_blocks,
        vectors_at(x, X_TYPE) + m.to(tl.int64)[:, None] * (x_vectors * PER_VECTOR),
        inside, blocks, first, last, X_FP8, BN, BM, SLAB, STAGES, TARGET,
    )  # fmt: skip
    if X_FP8:
        acc *= tl.load(x_scale.to(tl.pointer_type(tl.float32)) + m, m < num_m, other=0)[None, :]
    rows_at = m.to(tl.int64)[:, None] * num_n
    store_tile(y, acc, rows_at, inside, n, num_n, num_m * num_n, split, PARTIAL, EARLY, TARGET)


def mxfp4_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    x_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """y [M, N] bf16.

    x: [M, K] bf16, or e4m3 with x_scale [M] fp32. weight: [N, K/2] uint8, the code of the even
    column in the lower half. scales: [N, K/32] uint8. Errors: ValueError.
    """
    check("weight", weight, (torch.uint8,), (None, None))
    num_n, k = weight.shape[0], 2 * weight.shape[1]
    if k % BLOCK:
        raise ValueError(f"weight has rows of {k // 2} bytes; allowed: multiples of {BLOCK // 2}")
    check("scales", scales, (torch.uint8,), (num_n, k // BLOCK))
    check("x", x, (torch.bfloat16, E4M3), (None, k))
    num_m, x_fp8 = x.shape[0], x.dtype == E4M3
    check_scaled(x, x_scale)
    if x_scale is not None:
        check("x_scale", x_scale, (torch.float32,), (num_m,))
        x_scale = x_scale.contiguous()
    if not (num_m and num_n and k):
        return x.new_zeros((num_m, num_n), dtype=torch.bfloat16)
    same_device(x=x, weight=weight, scales=scales, x_scale=x_scale)
    target = target_of(x.device)
    x = rows_of(x)
    straight = few.serves(x)
    tiles = few.TILES if straight else TILES
    tile = tiles.of(target, num_m)
    parts = parts_for(tile, tiles.blocks, x.device, num_m, num_n, k)
    numbers = x.stride(0) * x.element_size() // 16, num_m, num_n, k // BLOCK
    operands = fixed("weight", weight), fixed("scales", scales, align=1), parts.out, *numbers
    ways = {"PARTIAL": parts.splits > 1, "EARLY": parts.early, "TARGET": target}
    more = parts.slabs, parts.splits
    if straight:
        start(mxfp4_few.mxfp4_few_kernel, tile, x.device, parts.grid, (x, *operands, *more), **ways)
    else:
        start(mxfp4_linear_kernel, tile, x.device, parts.grid, (x, x_scale, *operands, *more),
              X_FP8=x_fp8, **ways)  # fmt: skip
    return combined(parts)[:, 0]
