"""What the kernels compute, in plain PyTorch: the numbers of a format, then one product; a norm.

``dtype`` is that of the arithmetic, fp64 for a truth, fp32 otherwise; nothing is rounded after it
in products.
"""

from __future__ import annotations

import torch

from tp3.kernels.normed import GROUP, LARGEST_E4M3, SMALLEST_SCALE, Norm, Normed

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BLOCK = 128


def e2m1(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[..., K/2] uint8 to [..., K]; the code of the even column in the lower half."""
    table = torch.tensor([*_E2M1, *(-value for value in _E2M1)], dtype=dtype, device=packed.device)
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    return table[codes.long()]


def e8m0(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """uint8 to 2**(code - 127); 255 is NaN."""
    values = torch.exp2(codes.double() - 127)
    return torch.where(codes == 255, torch.nan, values).to(dtype)


def e4m3(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """uint8, or float8_e4m3fn, to its value; 127 and 255 are NaN."""
    bits = codes.view(torch.uint8).long()
    exponent, fraction = bits >> 3 & 15, bits & 7
    value = torch.where(
        exponent == 0,
        fraction.double() * 2.0**-9,
        torch.ldexp(8.0 + fraction.double(), exponent - 10),
    )
    value = torch.where(bits & 127 == 127, torch.nan, value)
    return torch.where(bits > 127, -value, value).to(dtype)


def mxfp4(packed: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Weights [..., N, K]. packed: [..., N, K/2]. scales: [..., N, K/32]."""
    return e2m1(packed, dtype) * e8m0(scales, dtype).repeat_interleave(32, dim=-1)


def fp8(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Weights [..., N, K]; scale: [..., N], or [..., ceil(N/128), ceil(K/128)]."""
    scale = scale.to(dtype)
    if scale.dim() == weight.dim() - 1:
        return e4m3(weight, dtype) * scale[..., None]
    for dim in (-2, -1):
        scale = scale.repeat_interleave(_BLOCK, dim=dim).narrow(dim, 0, weight.shape[dim])
    return e4m3(weight, dtype) * scale


def rows(x: torch.Tensor, x_scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """x [..., K]; x_scale: one of each row, or of each row and 128 of K."""
    if x_scale is None:
        return x.to(dtype)
    values, scale = e4m3(x, dtype), x_scale.to(dtype)
    if scale.dim() == x.dim() - 1:
        return values * scale[..., None]
    return values * scale.repeat_interleave(_BLOCK, dim=-1)[..., : x.shape[-1]]


def mxfp4_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    x_scale: torch.Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    return rows(x, x_scale, dtype) @ mxfp4(weight, scales, dtype).mT


def mxfp4_moe(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    expert_ids: torch.Tensor,
    x_scale: torch.Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Expert by expert; zeros where an id is none of an expert."""
    values = rows(x, x_scale, dtype)
    y = values.new_zeros((*expert_ids.shape, weight.shape[1]))
    for expert in range(weight.shape[0]):
        token, choice = torch.nonzero(expert_ids == expert, as_tuple=True)
        y[token, choice] = values[token] @ mxfp4(weight[expert], scales[expert], dtype).mT
    return y


def fp8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    x_scale: torch.Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    return rows(x, x_scale, dtype) @ fp8(weight, weight_scale, dtype).mT


def grouped_fp8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    *,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    return torch.einsum("mgk,gnk->mgn", x.to(dtype), fp8(weight, weight_scale, dtype))


def normalised(
    v: torch.Tensor, weight: torch.Tensor, norm: Norm, *, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """v / sqrt(mean(v²) + eps) · g of rows v [M, K]."""
    wide, gain = v.to(dtype), weight.to(dtype) + norm.plus_one
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps) * gain


def quantised(n: torch.Tensor, norm: Norm) -> tuple[torch.Tensor, torch.Tensor | None]:
    """bf16 [M, K] as ``norm`` wants it, and the scale."""
    if norm.quant is None:
        return n, None
    width = n.shape[-1]
    each = GROUP if norm.quant == "group" else width
    wide = torch.nn.functional.pad(n.float(), (0, -width % each)).unflatten(-1, (-1, each))
    scale = (wide.abs().amax(-1) / LARGEST_E4M3).clamp(min=SMALLEST_SCALE)
    codes = (wide / scale[..., None]).clamp(-LARGEST_E4M3, LARGEST_E4M3).flatten(-2)[..., :width]
    out = codes.to(torch.float8_e4m3fn)
    return out, scale if norm.quant == "group" else scale.flatten()


def add_rms_norm(
    y: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, norm: Norm
) -> Normed:
    """y, residual: [M, K] bf16; weight: [K]. In fp32, rounded where ``normed`` says so."""
    v = y.float() + residual.float()
    out, scale = quantised(normalised(v, weight, norm).bfloat16(), norm)
    return Normed(out, v.bfloat16(), scale)
