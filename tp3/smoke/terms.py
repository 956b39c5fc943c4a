"""Terms of a sum that any rank can make for every rank, new for every call, on CPU and GPU alike.

W ranks, N bf16 values each. Value i of rank r in call c is made of a 32-bit hash of (r, c, i): its
sign, an exponent from 2^-12 to 2^12, seven bits of mantissa. Neighbours cancel: in half of the
places ranks 0 and 1, 2 and 3, …, in the others 1 and 2, 3 and 4, …. Adding in another order, or
rounding to bf16 in between, then gives other bits. Integer arithmetic only, which gives the same on
every device.

The hash is Chris Wellons' lowbias32 (https://nullprogram.com/blog/2018/07/31/).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

LOWEST_EXPONENT, EXPONENTS = 127 - 12, 25
_SIGN, _FROM_ZERO = -0x8000, 0x80


def terms(world_size: int, call: int | Tensor, numel: int, *, device: str = "cpu") -> list[Tensor]:
    """What each rank brings to a call: W tensors bf16 [N]. call: its number, or an int32 tensor []
    that holds it, which a captured graph reads anew.
    """
    counter = torch.arange(numel, dtype=torch.int32, device=device)
    hashes = [_mixed(counter + _key(rank, call)) for rank in range(world_size)]
    values = [_bf16_bits(bits) for bits in hashes]
    from_zero = (hashes[0] & _FROM_ZERO) != 0
    cancels = (~from_zero, from_zero)
    for rank in range(1, world_size):
        values[rank] = torch.where(cancels[rank % 2], values[rank - 1] ^ _SIGN, values[rank])
    return [bits.view(torch.bfloat16) for bits in values]


def ordered_sum(parts: Sequence[Tensor]) -> Tensor:
    """((x0 + x1) + x2) + … in fp32, rounded once."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


def num_different(left: Tensor, right: Tensor) -> int:
    """Values of two bf16 tensors that differ in any bit."""
    return int((left.view(torch.int16) != right.view(torch.int16)).sum())


def _key(rank: int, call: int | Tensor) -> int | Tensor:
    """Far apart for neighbouring ranks and calls; fits int32."""
    if isinstance(call, Tensor):
        return call * _signed(0x85EBCA6B) + _signed((rank * 0x9E3779B9 + 0x7F3) & 0xFFFFFFFF)
    return _signed((rank * 0x9E3779B9 + call * 0x85EBCA6B + 0x7F3) & 0xFFFFFFFF)


def _mixed(x: Tensor) -> Tensor:
    """lowbias32 of int32, in place; it wraps around."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        x ^= (x >> shift).bitwise_and_((1 << (32 - shift)) - 1)
        x *= _signed(factor)
    return x


def _signed(value: int) -> int:
    return value - (1 << 32) if value >= 1 << 31 else value


def _bf16_bits(bits: Tensor) -> Tensor:
    """bf16 as int16: sign from bit 31, exponent from 8 to 15, mantissa from 0 to 6."""
    value = (bits >> 8).bitwise_and_(0xFF).mul_(EXPONENTS).bitwise_right_shift_(8)
    value.add_(LOWEST_EXPONENT).bitwise_left_shift_(7).bitwise_or_(bits & 0x7F)
    return value.bitwise_or_((bits >> 16).bitwise_and_(_SIGN)).to(torch.int16)
