"""y = x W^T with W in e4m3, scaled per channel, or in blocks of 128 x 128; for groups as well.

Contract: any M and N, K any multiple of 16. Nothing beyond K or N is read, no copy of W is made,
and blocks at the edges may be smaller. x is bf16, or e4m3 scaled per token or per token and 128 of
K. Each 128 of K are summed apart and then added in fp32: NVIDIA's sums of FP8 products keep fewer
bits than fp32. A NaN of W is one in y.

Symbols: M rows of x, N rows of W, K columns, G groups (1 unless ``grouped_fp8_linear``).
"""

import torch
import triton
import triton.language as tl

from tp3.kernels.codecs import dot, e4m3_values
from tp3.kernels.fp8_few import fp8_few_kernel
from tp3.kernels.operands import (
    E4M3,
    check,
    check_scaled,
    fixed,
    multiplies_e4m3,
    rows_of,
    same_device,
    start,
    target_of,
)
from tp3.kernels.primitives import below, vectors_at
from tp3.kernels.split_k import combined, parts_for, store_tile
from tp3.kernels.tiles import Tile, Tiles

BLOCK = 128  # of N and of K, that share a scale
SLAB = tl.constexpr(BLOCK)
UNIT = 16  # of K: bytes that a thread loads at once

# GPUs such as the RTX 4090 have 99 KiB of shared memory, of which these take 96 there.
TILES = Tiles(
    nvidia={
        16: Tile(n=128, m=16, slab=BLOCK, warps=4, stages=5),
        64: Tile(n=64, m=64, slab=BLOCK, warps=4, stages=5),
        128: Tile(n=128, m=64, slab=BLOCK, warps=8, stages=4),
    },
    amd={
        16: Tile(n=64, m=16, slab=BLOCK, warps=4, stages=2),
        64: Tile(n=64, m=64, slab=BLOCK, warps=8, stages=2),
    },
)


@triton.jit
def slab_product(
    w, x, X_FP8: tl.constexpr, NATIVE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    TARGET: tl.constexpr,
):  # fmt: skip
    """[BN, BM] fp32: one slab of W x^T.

    w: [BN, SLAB/4] uint32; with NATIVE [BN, SLAB] e4m3. x: [BM, SLAB] bf16, or as w.
    """
    part = tl.zeros([BN, BM], tl.float32)
    if NATIVE:
        part = tl.dot(w, tl.trans(x), part)
    elif X_FP8:
        for j in tl.static_range(2):
            part = dot(e4m3_values(w, j, TARGET), e4m3_values(x, j, TARGET), part, TARGET)
    else:
        # Even columns, then odd ones.
        x = x.reshape([BM, SLAB // 2, 2]).permute(0, 2, 1).reshape([BM, SLAB])
        w = tl.join(e4m3_values(w, 0, TARGET), e4m3_values(w, 1, TARGET))
        part = dot(w.permute(0, 2, 1).reshape([BN, SLAB]), x, part, TARGET)
    return part


@triton.jit(
    do_not_specialize=[
        "x", "x_scale", "w", "w_scale", "y", "x_vectors", "group_vectors", "num_m", "num_n",
        "num_units", "tiles_n", "slabs", "splits",
    ]
)  # fmt: skip
def fp8_linear_kernel(
    x: tl.int64,  # address of [M, G, K] bf16 or e4m3, rows x_vectors, groups group_vectors apart
    x_scale: tl.int64,  # X_FP8: address of fp32 [M, G], or [M, G, ceil(K/128)] with X_BLOCKS
    w: tl.int64,  # address of [G, N, K] e4m3
    w_scale: tl.int64,  # address of fp32 [G, N], or [G, ceil(N/128), ceil(K/128)] with W_BLOCKS
    y: tl.int64,  # address of [M, G, N] bf16, written; PARTIAL: parts of split_k, fp32, written
    x_vectors: tl.int64,  # of 16 bytes
    group_vectors: tl.int64,
    num_m: tl.int64,
    num_n: tl.int64,
    num_units: tl.int64,  # K / 16
    tiles_n: tl.int64,  # of a group
    slabs: tl.int64,  # of a split
    splits: tl.int64,
    X_FP8: tl.constexpr,
    NATIVE: tl.constexpr,  # e4m3 is multiplied as such
    X_BLOCKS: tl.constexpr,
    W_BLOCKS: tl.constexpr,
    PARTIAL: tl.constexpr,
    EARLY: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    SLAB: tl.constexpr,
    STAGES: tl.constexpr,
    TARGET: tl.constexpr,
):
    """>>> x [1, 2, 0, ...], a row of W 0x38 (1.0), 0xC0 (-2.0), scale 2.0: y = (1 - 4) * 2 = -6"""
    W_TYPE: tl.constexpr = tl.float8e4nv if NATIVE else tl.uint32
    X_TYPE: tl.constexpr = W_TYPE if X_FP8 else tl.bfloat16
    PER_W: tl.constexpr = 128 // W_TYPE.primitive_bitwidth  # elements of 16 bytes
    PER_X: tl.constexpr = 128 // X_TYPE.primitive_bitwidth
    X_UNIT: tl.constexpr = PER_X if X_FP8 else 16  # elements of 16 columns
    units = num_units.to(tl.int32)
    group = tl.program_id(0) // tiles_n
    split = (tl.program_id(1) % splits).to(tl.int32)
    tile_n = (tl.program_id(0) % tiles_n).to(tl.int32)
    n = tile_n * BN + tl.arange(0, BN)
    m = (tl.program_id(1) // splits).to(tl.int32) * BM + tl.arange(0, BM)
    groups = tl.num_programs(0) // tiles_n
    row = tl.minimum(n, num_n - 1).to(tl.int64) + group * num_n
    at_m = m.to(tl.int64)
    inside = m < num_m
    w_rows = vectors_at(w, W_TYPE) + row[:, None] * (num_units * PER_W)
    x_rows = vectors_at(x, X_TYPE) + (at_m * x_vectors + group * group_vectors)[:, None] * PER_X
    columns = tl.cdiv(units, SLAB // 16)  # of scales
    w_scales = w_scale.to(tl.pointer_type(tl.float32))
    if W_BLOCKS:
        rows = tl.cdiv(num_n, SLAB)
        w_scales += (group * rows + tile_n * BN // SLAB) * columns
    if X_FP8:
        x_scales = x_scale.to(tl.pointer_type(tl.float32))
        x_scales += (at_m * groups + group) * (columns if X_BLOCKS else 1)
    w_at = tl.arange(0, SLAB // 16 * PER_W)[None, :]
    x_at = tl.arange(0, SLAB // 16 * X_UNIT)[None, :]
    first = split * slabs.to(tl.int32)
    last = tl.minimum(first + slabs.to(tl.int32), columns)
    acc = tl.zeros([BN, BM], tl.float32)
    if W_BLOCKS:
        scale = tl.load(w_scales + first)
    for slab in tl.range(first, last, num_stages=STAGES):
        if W_BLOCKS:  # ahead: Triton's pipeline leaves single numbers out
            next_scale = tl.load(w_scales + slab + 1, slab + 1 < columns, other=0)
        at = slab * (SLAB // 16 * PER_W) + w_at
        w_slab = tl.load(w_rows + at, below(at, units * PER_W), other=0.0)
        at = slab * (SLAB // 16 * X_UNIT) + x_at
        x_slab = tl.load(x_rows + at, inside[:, None] & below(at, units * X_UNIT), other=0.0)
        part = slab_product(w_slab, x_slab, X_FP8, NATIVE, BM, BN, TARGET)
        if W_BLOCKS:
            part *= scale
            scale = next_scale
        if X_BLOCKS:
            part *= tl.load(x_scales + slab, inside, other=0)[None, :]
        acc += part
    if not W_BLOCKS:
        acc *= tl.load(w_scales + row)[:, None]
    if X_FP8 and not X_BLOCKS:
        acc *= tl.load(x_scales, inside, other=0)[None, :]
    rows_at, count = (at_m * groups + group)[:, None] * num_n, num_m * groups * num_n
    store_tile(y, acc, rows_at, inside[:, None], n, num_n, count, split, PARTIAL, EARLY, TARGET)


def fp8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    x_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """y [M, N] bf16.

    x: [M, K] bf16, or e4m3 with x_scale fp32, [M] or [M, ceil(K/128)]. weight: [N, K] e4m3.
    weight_scale: fp32 [N], or [ceil(N/128), ceil(K/128)]. Errors: ValueError.
    """
    check("x", x, (torch.bfloat16, E4M3), (None, None))
    check("weight", weight, (E4M3,), (None, x.shape[1]))
    if x_scale is not None:
        x_scale = x_scale[:, None]
    return product(TILES, x[:, None], weight[None], weight_scale[None], x_scale)[:, 0]


def product(
    tiles: Tiles,
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    x_scale: torch.Tensor | None = None,
    straight: bool = False,
) -> torch.Tensor:
    """y [M, G, N] bf16 of groups.

    x: [M, G, K]. x_scale: [M, G], or [M, G, ceil(K/128)]. weight: [G, N, K]. weight_scale: [G, N],
    or [G, ceil(N/128), ceil(K/128)]. straight: by the kernel that ``few`` tells of, which takes
    scales of blocks and x in bf16. Errors: ValueError.
    """
    groups, num_n, k = weight.shape
    num_m, x_fp8 = x.shape[0], x.dtype == E4M3
    columns = -(-k // BLOCK)
    if k % UNIT:
        raise ValueError(f"weight has rows of {k}; allowed: multiples of {UNIT}")
    check_scaled(x, x_scale)
    w_blocks = weight_scale.dim() == 3
    wanted = (groups, -(-num_n // BLOCK), columns) if w_blocks else (groups, num_n)
    check("weight_scale", weight_scale, (torch.float32,), wanted)
    x_blocks = x_scale is not None and x_scale.dim() == 3
    if x_scale is not None:
        wanted = (num_m, groups, columns) if x_blocks else (num_m, groups)
        check("x_scale", x_scale, (torch.float32,), wanted)
        x_scale = x_scale.contiguous()
    same_device(x=x, weight=weight, weight_scale=weight_scale, x_scale=x_scale)
    if not (num_m and groups and num_n and k):
        return x.new_zeros((num_m, groups, num_n), dtype=torch.bfloat16)
    target = target_of(x.device)
    x = rows_of(x)
    tile = tiles.of(target, num_m)
    parts = parts_for(tile, tiles.blocks, x.device, num_m, num_n, k, groups)
    in_vectors = [stride * x.element_size() // 16 for stride in x.stride()[:2]]
    operands = fixed("weight", weight), weight_scale.contiguous(), parts.out, *in_vectors
    numbers = num_m, num_n, k // UNIT, parts.grid[0] // groups, parts.slabs
    ways = {"PARTIAL": parts.splits > 1, "EARLY": parts.early, "TARGET": target}
    if straight:
        start(fp8_few_kernel, tile, x.device, parts.grid, (x, *operands, *numbers), **ways)
    else:
        start(
            fp8_linear_kernel, tile, x.device, parts.grid,
            (x, x_scale, *operands, *numbers, parts.splits),
            X_FP8=x_fp8, NATIVE=x_fp8 and multiplies_e4m3(x.device), X_BLOCKS=x_blocks,
            W_BLOCKS=w_blocks, **ways,
        )  # fmt: skip
    return combined(parts)
