"""Scales of blocks where nothing was trained: zeros need one, and kernels read it.

``nearest`` copies the scale of the nearest real block of the same row, then whole rows of scales:
no row's largest scale grows (NVFP4 kernels rescale by it), and none is denormal, zero or NaN. Where
the nearest is one of these, the row's smallest normal scale stands instead, else the tensor's, else
1. Bytes without a float dtype are e8m0: 2^(code - 127), 255 is NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tp3.pad.spread import Spread

E8M0 = (torch.uint8, torch.float8_e8m0fnu)
E8M0_ONE = 127
_NUMBERS = {"one": 1.0, "zero": 0.0}
_CODES = {"one": E8M0_ONE, "zero": 0, "2^-127": 0}


def pad(tensor: Tensor, spreads: tuple[Spread, ...], fill: str) -> Tensor:
    """Errors: ValueError for ``2^-127`` where the scales are not e8m0."""
    shape = [spread.padded for spread in spreads]
    spreads = tuple(spread for spread in spreads if spread.padded > 1) or spreads[:1]
    raw = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
    wide = raw = raw.reshape([spread.stock for spread in spreads])  # the last are a row's blocks
    for dim, spread in enumerate(spreads):
        if not spread.inert:
            wide = torch.cat(_pieces(wide, dim, spread), dim)
    if fill != "nearest":
        wide[_dummy(spreads, wide)] = _number(fill, tensor.dtype, raw)
    elif not _normal(raw, tensor.dtype).all():
        _mend(wide, tensor.dtype, _dummy(spreads, wide))
    return wide.view(tensor.dtype).reshape(shape)


def _pieces(raw: Tensor, dim: int, spread: Spread) -> list[Tensor]:
    """Trained runs, and where there is none the unit before it again, at the start the first."""
    last = next(first for first, _ in spread.runs if first is not None)
    pieces = []
    for first, count in spread.runs:
        if first is None:
            shape = [count if d == dim else -1 for d in range(raw.dim())]
            pieces.append(raw.narrow(dim, last, 1).expand(shape))
        else:
            pieces.append(raw.narrow(dim, first, count))
            last = first + count - 1
    return pieces


def _dummy(spreads: tuple[Spread, ...], wide: Tensor) -> Tensor:
    """Where nothing was trained."""
    mask = torch.zeros(wide.shape, dtype=torch.bool, device=wide.device)
    for dim, spread in enumerate(spreads):
        at = 0
        for first, count in spread.runs:
            if first is None:
                mask.narrow(dim, at, count).fill_(True)
            at += count
    return mask


def _number(fill: str, dtype: torch.dtype, raw: Tensor) -> Tensor:
    if dtype in E8M0:
        return raw.new_tensor(_CODES[fill])
    if fill not in _NUMBERS:
        raise ValueError(f"scale_fill {fill} is for e8m0 scales, got {dtype}")
    return torch.tensor(_NUMBERS[fill], device=raw.device).to(dtype).view(raw.dtype)


def _mend(wide: Tensor, dtype: torch.dtype, dummy: Tensor) -> None:
    """Replace what is not a normal number in blocks that nothing was trained for."""
    normal = _normal(wide, dtype)
    bad = dummy & ~normal
    if not bad.any():
        return
    values = _values(wide, dtype)
    least = torch.where(normal, values, torch.inf)
    row = least.amin(-1, keepdim=True)
    whole = least.amin()
    best = torch.where(row.isfinite(), row, torch.where(whole.isfinite(), whole, 1.0))
    chosen = best.expand_as(values)[bad]
    if dtype in E8M0:
        wide[bad] = (chosen.log2().round() + E8M0_ONE).to(torch.uint8)
    else:
        wide.view(dtype)[bad] = chosen.to(dtype)


def _normal(raw: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype in E8M0:
        return (raw > 0) & (raw < 255)
    values = _values(raw, dtype)
    return values.isfinite() & (values.abs() >= torch.finfo(dtype).smallest_normal)


def _values(raw: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype in E8M0:
        return torch.pow(2.0, raw.double() - E8M0_ONE)
    return raw.view(dtype).double()
