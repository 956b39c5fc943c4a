"""Rounding in the interpreter, where bf16 is rounded by integers: exact against torch, so that what
the other tests here compare bit by bit is the protocol and the order of the sum.
"""

import numpy as np
import torch
import triton
import triton.language as tl

from tests.kernels.sums import held
from tp3.kernels.arithmetic import narrowed, widened

TILE = 1 << 16
# For each of the 2**16 upper halves of an fp32: ties, both neighbours of a tie, and the ends.
LOW_HALVES = [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF]


@triton.jit
def narrow_kernel(x, out, DTYPE: tl.constexpr, TILE: tl.constexpr):
    offsets = tl.arange(0, TILE)
    total = tl.load(x + offsets)
    tl.store(out + offsets, narrowed(total, "SUM", 2, DTYPE, "interpret"))


@triton.jit
def widen_kernel(x, out, DTYPE: tl.constexpr, TILE: tl.constexpr):
    offsets = tl.arange(0, TILE)
    tl.store(out + offsets, widened(tl.load(x + offsets), DTYPE))


def bits_of(tensor):
    """As integers; every NaN is one value."""
    kind = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    return torch.where(torch.isnan(tensor), -1, tensor.view(kind))


def rounded_here(dtype, low_half):
    upper = torch.arange(TILE, dtype=torch.int64) << 16
    x = (upper | low_half).to(torch.uint32).view(torch.float32)
    out = torch.full((TILE,), 7.0, dtype=dtype)
    narrow_kernel[(1,)](x, out, _names()[dtype], TILE)
    return x, out


def _names():
    return {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def every_rounding():
    checked = 0
    for dtype in (torch.bfloat16, torch.float16):
        for low_half in LOW_HALVES:
            x, got = rounded_here(dtype, low_half)
            want = x.to(dtype)
            wrong = (bits_of(got) != bits_of(want)).nonzero().flatten()
            assert not wrong.numel(), (dtype, hex(low_half), x[wrong[:3]], got[wrong[:3]])
            assert not (got == 7.0).all()
            checked += x.numel()
    return checked + every_widening()


def every_widening():
    checked = 0
    for dtype, name in _names().items():
        x = torch.arange(TILE, dtype=torch.int64).to(torch.uint16).view(dtype)
        out = torch.full((TILE,), 7.0)
        widen_kernel[(1,)](x, out, name, TILE)
        wrong = bits_of(out) != bits_of(x.float())
        if dtype == torch.bfloat16:  # the interpreter does not know its subnormals; GPUs do
            size = x.float().abs()
            wrong &= ~((size > 0) & (size < torch.finfo(dtype).smallest_normal))
        assert not wrong.any(), (dtype, x[wrong][:3], out[wrong][:3])
        checked += x.numel()
    return checked


def test_rounding_is_to_nearest_even_and_widening_exact(interpreter):
    assert interpreter.alone(every_rounding) == 2 * (len(LOW_HALVES) + 1) * TILE


def test_truncation_is_seen():
    """What the interpreter does by itself."""
    x = torch.from_numpy((np.arange(TILE, dtype=np.uint32) << 16 | 0x8001).view(np.float32))
    kept = held(x.numpy(), torch.bfloat16)
    assert (bits_of(kept) != bits_of(x.to(torch.bfloat16))).any()
