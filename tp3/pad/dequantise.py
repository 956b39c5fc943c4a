"""Plain weights from stored ones of 8 bits and of 4-bit floats: what `verify` compares.

Written after the formats' descriptions (OCP Microscaling 1.0, ModelOpt, compressed-tensors) and
apart from the code that pads them, so that one is a check of the other. A weight is [..., N, K].
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tp3.pad.companions import CACHE, PRIMARY, SUFFIXES
from tp3.pad.formats import Format

E2M1 = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
SCALES = ("weight_scale_inv", "weight_scale", "scale")
BESIDE = frozenset((*SUFFIXES, *CACHE)) - PRIMARY
FLOATS = ("fp8", "int8", "mxfp8", "mxfp4", "nvfp4")


def dequantised(weights: Mapping[str, Tensor], form: Format) -> dict[str, Tensor]:
    """All weights as a plain checkpoint has them, quantised ones in fp32. Errors: ValueError for a
    format of packed integers.
    """
    for name in [form.name, *(part.name for part in form.parts)]:
        if name not in (*FLOATS, "plain"):
            raise ValueError(f"verify reads weights in {', '.join(FLOATS)}, got {name}")
    plain = {}
    for name, tensor in weights.items():
        base, _, suffix = name.rpartition(".")
        scale = next((f"{base}.{each}" for each in SCALES if f"{base}.{each}" in weights), None)
        if name.endswith("_blocks"):  # experts, which plain checkpoints have as [E, K, N]
            base = name.removesuffix("_blocks")
            wide = _codes(tensor) * _number(weights[base + "_scales"])[..., None]
            plain[base] = wide.flatten(-2).transpose(-1, -2).contiguous()
        elif suffix in ("weight", "weight_packed") and scale is not None:
            of = form.of(base)
            wide = _codes(tensor) if of.name in ("mxfp4", "nvfp4") else tensor.float()
            scales = _number(weights[scale])
            if f"{base}.weight_scale_2" in weights:
                scales = scales * weights[f"{base}.weight_scale_2"].float()
            if f"{base}.weight_global_scale" in weights:
                scales = scales / weights[f"{base}.weight_global_scale"].float()
            plain[f"{base}.weight"] = wide * _spread(scales, wide, of)
        elif suffix not in BESIDE and not name.endswith("_scales"):
            plain[name] = tensor
    return plain


def _codes(packed: Tensor) -> Tensor:
    """Two e2m1 numbers of each byte, the low half first."""
    packed = packed.view(torch.uint8)
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).long()
    return E2M1[codes & 7] * (1 - 2 * (codes >> 3))


def _number(scales: Tensor) -> Tensor:
    """Scales as numbers; bytes are exponents (e8m0)."""
    if scales.dtype in (torch.uint8, torch.float8_e8m0fnu):
        return torch.exp2(scales.view(torch.uint8).float() - 127)
    return scales.float()


def _spread(scales: Tensor, wide: Tensor, form: Format) -> Tensor:
    """A scale for every entry, or for every row, or one."""
    if scales.numel() == 1:
        return scales.reshape(())
    if scales.ndim == 4:  # [N/r, 1, K/c, 1]
        scales = scales[:, 0, :, 0]
    if scales.ndim == wide.ndim - 1:
        scales = scales[..., None]
    for dim, block in ((-2, form.rows), (-1, form.columns)):
        if scales.shape[dim] not in (1, wide.shape[dim]):
            scales = scales.repeat_interleave(block, dim).narrow(dim, 0, wide.shape[dim])
    return scales
