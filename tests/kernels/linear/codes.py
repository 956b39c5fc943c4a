"""Kernels that only decode, and what they must give: every code at every place of a word."""

from itertools import product

import torch
import triton
import triton.language as tl

from tp3.kernels import reference
from tp3.kernels.codecs import e2m1_values, e4m3_values, e8m0_pair
from tp3.kernels.grouped_fp8_linear import grouped_fp8_linear
from tp3.kernels.mxfp4_linear import mxfp4_linear
from tp3.kernels.operands import start, target_of

WIDTH = 16  # words of a row


@triton.jit(do_not_specialize=["words", "scales", "out"])
def e2m1_kernel(
    words: tl.int64,  # address of [ROWS, WIDTH] uint32
    scales: tl.int64,  # address of [ROWS, WIDTH] uint8, one for each word
    out: tl.int64,  # address of [4, ROWS, 2 WIDTH] bf16, written
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    TARGET: tl.constexpr,
):
    at = tl.arange(0, ROWS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    packed = tl.load(words.to(tl.pointer_type(tl.uint32)) + at)
    scale = e8m0_pair(tl.load(scales.to(tl.pointer_type(tl.uint8)) + at))
    to = tl.arange(0, ROWS)[:, None] * 2 * WIDTH + tl.arange(0, 2 * WIDTH)[None, :]
    for j in tl.static_range(4):
        values = e2m1_values(packed, j, scale, TARGET)
        tl.store(out.to(tl.pointer_type(tl.bfloat16)) + j * 2 * ROWS * WIDTH + to, values)


@triton.jit(do_not_specialize=["words", "out"])
def e4m3_kernel(
    words: tl.int64,  # address of [ROWS, WIDTH] uint32
    out: tl.int64,  # address of [2, ROWS, 2 WIDTH] bf16, written
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    TARGET: tl.constexpr,
):
    at = tl.arange(0, ROWS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    packed = tl.load(words.to(tl.pointer_type(tl.uint32)) + at)
    to = tl.arange(0, ROWS)[:, None] * 2 * WIDTH + tl.arange(0, 2 * WIDTH)[None, :]
    for j in tl.static_range(2):
        values = e4m3_values(packed, j, TARGET)
        tl.store(out.to(tl.pointer_type(tl.bfloat16)) + j * 2 * ROWS * WIDTH + to, values)


def wrong_e2m1(device="cpu"):
    """How many decoded codes differ in a bit from the reference, of each code with each scale."""
    made = torch.Generator().manual_seed(0)
    scales = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, WIDTH).contiguous()
    same = torch.arange(16, dtype=torch.uint8)[:, None] * 0x11
    uniform = same.expand(16, 4).reshape(1, -1).expand(256, -1)
    mixed = torch.randint(0, 256, (256, 4 * WIDTH), generator=made, dtype=torch.uint8)
    wrong = 0
    for packed in (uniform.contiguous(), mixed):
        packed, scales = packed.to(device), scales.to(device)
        out = torch.full((4, 256, 2 * WIDTH), 7.0, dtype=torch.bfloat16, device=device)
        _start(e2m1_kernel, (packed, scales, out))
        scale = reference.e8m0(scales, torch.float64).repeat_interleave(8, dim=1)
        want = (reference.e2m1(packed, torch.float64) * scale).bfloat16()
        wrong += _different(out, in_pairs(want, 8))
    return wrong


def wrong_e4m3(device="cpu"):
    made = torch.Generator().manual_seed(0)
    uniform = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 4 * WIDTH).contiguous()
    mixed = torch.randint(0, 256, (256, 4 * WIDTH), generator=made, dtype=torch.uint8)
    wrong = 0
    for codes in (uniform, mixed):
        codes = codes.to(device)
        out = torch.full((2, 256, 2 * WIDTH), 7.0, dtype=torch.bfloat16, device=device)
        _start(e4m3_kernel, (codes, out))
        wrong += _different(out, in_pairs(reference.e4m3(codes, torch.bfloat16), 4))
    return wrong


def wrong_products(device="cpu"):
    """How many weights ``mxfp4_linear`` has other than the reference when x picks one column: each
    code with each scale that leaves it finite, where a tile's scales are near each other, where
    they are alike, and where they are not, in rows of one slab and of two. Rows of NaN must be NaN.
    """
    made = torch.Generator().manual_seed(0)
    alike = torch.arange(128, 136).repeat_interleave(32)  # around the largest multiplied once
    packed = torch.arange(16, dtype=torch.uint8) + 16 * torch.arange(16, dtype=torch.uint8).flip(0)
    wrong = 0
    for order, k in (
        (torch.arange(256), 32),
        (torch.randperm(256, generator=made), 1024),
        (alike, 32),
    ):
        scales = torch.full((256, k // 32), 120, dtype=torch.uint8)
        scales[:, 0] = order
        weight = packed.repeat(256, k // 32).to(device)
        true = reference.mxfp4(weight, scales.to(device), torch.float64)
        for power, column in product((-60, 0, 60), range(0, 32, 8)):
            x = torch.zeros(8, k)
            x[torch.arange(8), torch.arange(column, column + 8)] = 2.0**power
            y = mxfp4_linear(x.bfloat16().to(device), weight, scales.to(device))
            assert y[:, order == 255].isnan().all()
            want = true[:, column : column + 8].T * 2.0**power
            sure = (want == 0) | ((want.abs() > 2.0**-100) & (want.abs() < 2.0**100))
            wrong += int((y != want.bfloat16())[sure & (order < 253).to(device)].sum())
    return wrong


def wrong_groups(device="cpu"):
    """How many elements ``grouped_fp8_linear`` has other than the reference where x picks a column:
    each code at each place (interpreted, at every fifth eight of places), with scales of their own.
    Rows of NaN must be NaN.
    """
    made = torch.Generator().manual_seed(0)
    groups, rows, k = 2, 256, 656  # a slab and a part of one
    codes = torch.arange(rows, dtype=torch.uint8)[:, None].expand(rows, k)
    mixed = torch.randint(0, 127, (rows, k), generator=made, dtype=torch.uint8)
    weight = torch.stack((codes, mixed)).to(device).view(torch.float8_e4m3fn)
    scale = (torch.rand(groups, rows // 128, -(-k // 128), generator=made) + 0.25).to(device)
    true = reference.fp8(weight, scale, torch.float32).bfloat16()
    wrong = 0
    for first in range(0, k, 40 if device == "cpu" else 8):
        x = torch.zeros(8, groups, k)
        x[torch.arange(8), :, torch.arange(first, first + 8)] = 1.0
        y = grouped_fp8_linear(x.bfloat16().to(device), weight, scale)
        want = true[:, :, first : first + 8].permute(2, 0, 1)
        nan = want.isnan()
        assert nan.sum() == 8 * 2
        assert y[nan].isnan().all()
        wrong += int((y != want)[~nan].sum())
    return wrong


def in_pairs(values, per_word):
    """[R, K] to [per_word/2, R, K/(per_word/2)]: pair J holds columns J, J + per_word/2, ..."""
    return torch.stack([values[:, j :: per_word // 2] for j in range(per_word // 2)])


def _start(kernel, tensors):
    device = tensors[0].device
    constants = {"ROWS": 256, "WIDTH": WIDTH, "TARGET": target_of(device)}
    start(kernel, 4, device, (1, 1), tensors, **constants)


def _different(got, want):
    nan = torch.isnan(want)
    assert torch.isnan(got[nan]).all()
    return int((got.view(torch.int16) != want.view(torch.int16))[~nan].sum())
