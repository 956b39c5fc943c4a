"""y[t, j] = W[expert_ids[t, j]] x[t]: MXFP4 weights of many experts, tokens grouped by expert.

Contract: that of ``mxfp4_linear`` for each expert; an expert without tokens costs nothing, a choice
outside 0 to E - 1 gives zeros. Nothing waits for the GPU. Few slots are taken one by one, without
sorting them; of many, the grid has room for the worst spread of tokens, and blocks beyond the tiles
there are end at once.

Symbols: T tokens, C choices of each, S = T C slots, E experts, N rows and K columns of W.
"""

import torch
import triton
import triton.language as tl

from tp3.kernels.arithmetic import narrowed
from tp3.kernels.mxfp4_linear import BLOCK, mxfp4_product
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
from tp3.kernels.primitives import longs_at, vectors_at
from tp3.kernels.tiles import Tile, Tiles

LEAST_EXPERTS = 512  # one kernel for all numbers up to here
FEW_SLOTS = 8

# By the mean number of slots of an expert.
TILES = Tiles(
    nvidia={
        16: Tile(n=64, m=16, slab=256, warps=4, stages=3),
        64: Tile(n=64, m=64, slab=128, warps=4, stages=4),
    },
    amd={
        16: Tile(n=64, m=16, slab=128, warps=4, stages=2),
        64: Tile(n=128, m=64, slab=128, warps=8, stages=2),
    },
)


@triton.jit
def tile_of(bounds, number, num_experts, EXPERTS: tl.constexpr, BM: tl.constexpr):
    """Expert of tile ``number`` (num_experts if there is no such tile), its first slot in order,
    and the end of the expert's.
    """
    e = tl.arange(0, EXPERTS)
    begin = tl.load(longs_at(bounds, 8 * e), e < num_experts, other=0).to(tl.int32)
    end = tl.load(longs_at(bounds, 8 * e + 8), e < num_experts, other=0).to(tl.int32)
    tiles = tl.cdiv(end - begin, BM)
    expert = tl.sum((tl.cumsum(tiles) <= number).to(tl.int32))
    expert = tl.minimum(expert, num_experts.to(tl.int32))
    before = tl.sum(tl.where(e < expert, tiles, 0))
    first = tl.sum(tl.where(e == expert, begin, 0)) + (number - before) * BM
    return expert, first, tl.sum(tl.where(e == expert, end, 0))


@triton.jit(
    do_not_specialize=[
        "x", "x_scale", "w", "scales", "order", "bounds", "y", "x_vectors", "choices",
        "num_experts", "num_n", "num_blocks",
    ]
)  # fmt: skip
def mxfp4_moe_kernel(
    x: tl.int64,  # address of [T, K] bf16 or e4m3, rows x_vectors apart
    x_scale: tl.int64,  # X_FP8: address of [T] fp32
    w: tl.int64,  # address of [E, N, K/8] uint32, eight codes each
    scales: tl.int64,  # address of [E, N, K/32] uint8
    order: tl.int64,  # address of [S] int64: slots, by expert; ONE_BY_ONE: experts, by slot
    bounds: tl.int64,  # address of [E + 1] int64: where in order an expert begins
    y: tl.int64,  # address of [S, N] bf16, written where a slot has an expert; ONE_BY_ONE: all
    x_vectors: tl.int64,  # of 16 bytes, from one row of x to the next
    choices: tl.int64,
    num_experts: tl.int64,
    num_n: tl.int64,
    num_blocks: tl.int64,  # K / 32
    EXPERTS: tl.constexpr,  # a power of two, at least E
    ONE_BY_ONE: tl.constexpr,
    X_FP8: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    SLAB: tl.constexpr,
    STAGES: tl.constexpr,
    TARGET: tl.constexpr,
):
    """>>> x [[1, 0, ...]], ids [[1, 0]], W[0] and W[1] 2.0 and 3.0 in column 0: y = [[[3], [2]]]"""
    X_TYPE: tl.constexpr = tl.uint32 if X_FP8 else tl.bfloat16
    PER_VECTOR: tl.constexpr = 128 // X_TYPE.primitive_bitwidth
    blocks = num_blocks.to(tl.int32)
    if ONE_BY_ONE:
        first = tl.program_id(1)
        end = first + 1
        expert = tl.load(longs_at(order, 8 * first))
        known = (expert >= 0) & (expert < num_experts)
        expert = tl.where(known, expert, 0)
        blocks = tl.where(known, blocks, 0)  # a sum of nothing: zeros
    else:
        expert, first, end = tile_of(bounds, tl.program_id(1), num_experts, EXPERTS, BM)
    if expert < num_experts:
        n = tl.program_id(0) * BN + tl.arange(0, BN)
        place = first + tl.arange(0, BM)
        inside = place < end
        slot = place.to(tl.int64)
        if not ONE_BY_ONE:
            slot = tl.load(longs_at(order, 8 * place), inside, other=0)
        token = slot // choices
        row = expert.to(tl.int64) * num_n + tl.minimum(n, num_n - 1)[:, None]
        acc = mxfp4_product(
            vectors_at(w, tl.uint32) + row * (num_blocks * 4),
            scales.to(tl.pointer_type(tl.uint8)) + row * num_blocks,
            vectors_at(x, X_TYPE) + token[:, None] * (x_vectors * PER_VECTOR),
            inside[:, None], blocks, 0, tl.cdiv(blocks, SLAB // 32), X_FP8, BN, BM, SLAB, STAGES,
            TARGET,
        )  # fmt: skip
        if X_FP8:
            scale = tl.load(x_scale.to(tl.pointer_type(tl.float32)) + token, inside, other=0)
            acc *= scale[None, :]
        y_row = slot[:, None] * num_n
        result = narrowed(tl.trans(acc), "SUM", 1, tl.bfloat16, TARGET)
        written = inside[:, None] & (n < num_n)[None, :]
        tl.store(vectors_at(y, tl.bfloat16) + y_row + n[None, :], result, written)


def mxfp4_moe(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    expert_ids: torch.Tensor,
    x_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """y [T, C, N] bf16.

    x: [T, K] bf16, or e4m3 with x_scale [T] fp32. weight: [E, N, K/2] uint8, the code of the even
    column in the lower half. scales: [E, N, K/32] uint8. expert_ids: [T, C] int32 or int64. For a
    second product with rows of their own for each choice, give [T C, K] and ids [T C, 1]. Errors:
    ValueError.
    """
    check("weight", weight, (torch.uint8,), (None, None, None))
    num_experts, num_n, k = weight.shape[0], weight.shape[1], 2 * weight.shape[2]
    if k % BLOCK:
        raise ValueError(f"weight has rows of {k // 2} bytes; allowed: multiples of {BLOCK // 2}")
    check("scales", scales, (torch.uint8,), (num_experts, num_n, k // BLOCK))
    check("x", x, (torch.bfloat16, E4M3), (None, k))
    tokens, x_fp8 = x.shape[0], x.dtype == E4M3
    check("expert_ids", expert_ids, (torch.int32, torch.int64), (tokens, None))
    check_scaled(x, x_scale)
    if x_scale is not None:
        check("x_scale", x_scale, (torch.float32,), (tokens,))
        x_scale = x_scale.contiguous()
    same_device(x=x, weight=weight, scales=scales, expert_ids=expert_ids, x_scale=x_scale)
    choices = expert_ids.shape[1]
    slots, size = tokens * choices, (tokens, choices, num_n)
    if not (slots and num_experts and num_n and k):
        return x.new_zeros(size, dtype=torch.bfloat16)
    target = target_of(x.device)
    x = rows_of(x)
    tile = TILES.of(target, -(-slots // num_experts))
    ids = expert_ids.reshape(-1).long()
    one_by_one = slots <= max(FEW_SLOTS, num_experts // 2)  # few choose the same expert
    if one_by_one:
        y = torch.empty(size, dtype=torch.bfloat16, device=x.device)
        order, bounds, tiles_m = ids, None, slots
    else:
        y = x.new_zeros(size, dtype=torch.bfloat16)
        by_expert, order = torch.sort(ids, stable=True)
        bounds = torch.searchsorted(by_expert, torch.arange(num_experts + 1, device=x.device))
        # A tile that is not full for each expert that has tokens, and all full ones.
        tiles_m = slots // tile.m + min(num_experts, slots)
    start(
        mxfp4_moe_kernel,
        tile,
        x.device,
        (-(-num_n // tile.n), tiles_m),
        (
            x, x_scale, fixed("weight", weight), fixed("scales", scales, align=1), order, bounds,
            y, x.stride(0) * x.element_size() // 16, choices, num_experts, num_n,
            k // BLOCK,
        ),
        EXPERTS=max(LEAST_EXPERTS, triton.next_power_of_2(num_experts)), ONE_BY_ONE=one_by_one,
        X_FP8=x_fp8, TARGET=target,
    )  # fmt: skip
    return y
