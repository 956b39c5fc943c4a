"""Residual, RMSNorm and FP8 of a row, as data: what is computed, on what, into what. No Triton.

Symbols: M rows of K values, G = ceil(K / 128) groups. Of a row of y, all in fp32 but where it says
bf16: v = y + residual; residual_out = bf16(v); n = bf16(v / sqrt(mean(v²) + eps) · g), g = w or
1 + w. That is out, or with FP8: scale = max(amax|n| / 448, 1 / (448 · 512)) of the row ("token") or
of each 128 values ("group"), out = e4m3(n / scale), to the nearest even.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

QUANTS = (None, "token", "group")
GROUP = 128
MOST_WIDTH = 16384
VECTOR_BYTES = 16
LARGEST_E4M3 = 448.0
SMALLEST_SCALE = 1 / (LARGEST_E4M3 * 512)


@dataclass(frozen=True)
class Norm:
    """plus_one: g is 1 + w, as in Gemma and Qwen-Next. quant: None for bf16."""

    eps: float
    plus_one: bool = False
    quant: str | None = None

    def __post_init__(self) -> None:
        if self.quant not in QUANTS:
            raise ValueError(f"quant is {self.quant!r}; allowed: {', '.join(map(repr, QUANTS))}")
        if not 0 <= self.eps < float("inf"):
            raise ValueError(f"eps is {self.eps}; it must be a finite number from 0 on")

    def __str__(self) -> str:
        gain = "1 + w" if self.plus_one else "w"
        return f"{self.quant or 'bf16'} {gain} eps {self.eps:g}"


class Normed(NamedTuple):
    """out: [M, K] bf16 or e4m3. residual_out: [M, K] bf16. scale: [M], [M, G] or None, fp32."""

    out: Tensor
    residual_out: Tensor
    scale: Tensor | None


def check(x: Tensor, residual: Tensor, weight: Tensor) -> None:
    """Errors: ValueError unless x and residual are [M, K], weight [K], bf16, on one device."""
    tensors = {"x": x, "residual": residual, "weight": weight}
    for name, tensor in tensors.items():
        if tensor.dtype is not torch.bfloat16:
            raise ValueError(f"{name} is {tensor.dtype}; allowed: torch.bfloat16")
        if tensor.device != x.device:
            raise ValueError(f"{name} is on {tensor.device}; allowed: {x.device}, as x")
    if x.dim() != 2 or x.shape[1] % 8 or not 8 <= x.shape[1] <= MOST_WIDTH:
        raise ValueError(
            f"x has shape {list(x.shape)}; allowed: [M, K], K a multiple of 8 up to {MOST_WIDTH}"
        )
    for name, shape in (("residual", x.shape), ("weight", x.shape[1:])):
        if tensors[name].shape != shape:
            raise ValueError(
                f"{name} has shape {list(tensors[name].shape)}; allowed: {list(shape)}, as x has "
                f"{list(x.shape)}"
            )


def empty(x: Tensor, norm: Norm) -> Normed:
    """Results for an x [M, K], not written."""
    rows, width = x.shape
    dtype = torch.float8_e4m3fn if norm.quant else torch.bfloat16
    shape = {"token": (rows,), "group": (rows, -(-width // GROUP))}.get(norm.quant or "")
    return Normed(
        x.new_empty(x.shape, dtype=dtype),
        x.new_empty(x.shape),
        None if shape is None else x.new_empty(shape, dtype=torch.float32),
    )


def dense(tensor: Tensor) -> Tensor:
    """The tensor, or a copy where it is not one piece that starts at a multiple of 16 bytes."""
    tensor = tensor.detach()
    if tensor.is_contiguous() and not tensor.data_ptr() % VECTOR_BYTES:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
