"""Where blocks share K: each writes its part in fp32, then one kernel adds the parts in order.

No atomics: the same bits on every run. A part takes M*N elements, rounded up to ``PART``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tp3.kernels.arithmetic import narrowed
from tp3.kernels.operands import start, starts_early, target_of
from tp3.kernels.primitives import vectors_at
from tp3.kernels.tiles import Tile, split_of

PART = tl.constexpr(512)
_AT_ONCE = tl.constexpr(8)  # parts on their way together: one after another, each costs a latency
_WARPS = 4


@triton.jit(do_not_specialize=["parts", "y", "count", "splits"])
def combine_kernel(
    parts: tl.int64,  # address of [splits, count rounded up to PART] fp32
    y: tl.int64,  # address of [count] bf16, written
    count: tl.int64,
    splits: tl.int64,
    EARLY: tl.constexpr,  # started while the parts are being written
    TARGET: tl.constexpr,
):
    """>>> parts [[1, 2], [3, 4], [5, 6]]: y = [(1+3)+5, (2+4)+6] = [9, 12]"""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    offsets = tl.program_id(0).to(tl.int64) * PART + tl.arange(0, PART)
    stride = tl.cdiv(count, PART) * PART
    whole = tl.cdiv(count, 4) * 4  # vectors, so that they are loaded as such
    total = tl.zeros([PART], tl.float32)
    for first in range(0, splits.to(tl.int32), _AT_ONCE):
        for ahead in tl.static_range(_AT_ONCE):
            split = first + ahead
            part = vectors_at(parts, tl.float32) + split * stride + offsets
            total += tl.load(part, offsets < tl.where(split < splits, whole, 0), other=0)
    result = narrowed(total, "SUM", 1, tl.bfloat16, TARGET)
    tl.store(vectors_at(y, tl.bfloat16) + offsets, result, offsets < count)


@triton.jit
def store_tile(
    y, tile, rows_at, inside, n, num_n, count, split, PARTIAL: tl.constexpr, EARLY: tl.constexpr,
    TARGET: tl.constexpr,
):  # fmt: skip
    """Write a tile [BN, BM] fp32 to y in bf16, or with PARTIAL as part ``split``.

    rows_at, inside: [BM, 1] where rows of y start (int64), and whether they are there. n: [BN]
    places in a row of num_n. count: elements of y.
    """
    written = inside & (n < num_n)[None, :]
    if PARTIAL:
        if EARLY:  # the kernel that adds the parts gets ready
            tl.extra.cuda.gdc_launch_dependents()
        rows_at += split.to(tl.int64) * (tl.cdiv(count, PART) * PART)
        tl.store(vectors_at(y, tl.float32) + rows_at + n[None, :], tl.trans(tile), written)
    else:
        result = narrowed(tl.trans(tile), "SUM", 1, tl.bfloat16, TARGET)
        tl.store(vectors_at(y, tl.bfloat16) + rows_at + n[None, :], result, written)


@dataclass(frozen=True)
class Parts:
    """y: [M, G, N] bf16. out: y, or the parts. slabs: of a block. early: the parts are added by a
    kernel that starts before the last is written, and waits for it.
    """

    y: torch.Tensor
    out: torch.Tensor
    grid: tuple[int, int]
    slabs: int
    splits: int
    early: bool


def parts_for(
    tile: Tile,
    blocks: int,
    device: torch.device,
    num_m: int,
    num_n: int,
    k: int,
    groups: int = 1,
) -> Parts:
    """Memory and grid of a product of [M, G, K] and [G, N, K]; K is split for up to ``blocks``."""
    tiles_m, tiles_n = -(-num_m // tile.m), -(-num_n // tile.n) * groups
    slabs, splits = split_of(tiles_m * tiles_n, -(-k // tile.slab), blocks)
    y = torch.empty((num_m, groups, num_n), dtype=torch.bfloat16, device=device)
    out = y
    if splits > 1:
        size = -(-y.numel() // PART.value) * PART.value
        out = torch.empty((splits, size), dtype=torch.float32, device=device)
    early = splits > 1 and starts_early(device)
    return Parts(y, out, (tiles_n, tiles_m * splits), slabs, splits, early)


def combined(parts: Parts) -> torch.Tensor:
    """y [M, G, N]."""
    y = parts.y
    if parts.splits > 1:
        start(
            combine_kernel,
            _WARPS,
            y.device,
            (-(-y.numel() // PART.value), 1),
            (parts.out, y, y.numel(), parts.splits),
            early=parts.early,
            EARLY=parts.early,
            TARGET=target_of(y.device),
        )
    return y
