"""The mathematics of the blocks, for one rank's heads, from the papers and model cards; plain loops
over tokens where a kernel would scan in chunks. Shapes: T tokens, H query heads, G KV heads, D
entries of a head; no batch. Everything is computed in the dtype of its inputs.
"""

from __future__ import annotations

from math import inf

import torch
import torch.nn.functional as F
from torch import Tensor


def rms(x: Tensor, weight: Tensor, eps: float, squares: Tensor | None = None) -> Tensor:
    """RMSNorm over the last dimension. squares: the mean square, where others hold parts of it."""
    mean = x.square().mean(-1, keepdim=True) if squares is None else squares
    return x * (mean + eps).rsqrt() * weight


def rotary(num_tokens: int, dim: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines [T, dim / 2]; checkpoints were trained with frequencies in fp32."""
    frequencies = 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    angles = torch.arange(num_tokens)[:, None].double() * frequencies.double()
    return angles.cos(), angles.sin()


def rotate(x: Tensor, tables: tuple[Tensor, Tensor], *, interleaved: bool = False) -> Tensor:
    """The first entries of each head [T, H, D] turned, in pairs of halves or of neighbours."""
    cos, sin = (table[:, None] for table in tables)
    half = cos.shape[-1]
    turned, rest = x.split([2 * half, x.shape[-1] - 2 * half], -1)
    if interleaved:
        left, right = turned[..., ::2], turned[..., 1::2]
    else:
        left, right = turned.chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin, rest], -1)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    *,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention [T, H, D] over [T, G, D] → [T, H, Dv]; head h reads KV head h // (H / G).
    window: of the keys seen, the last so many. sinks: of each head, a score without a value.
    """
    each = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(each, 1), v.repeat_interleave(each, 1)
    scores = torch.einsum("thd,shd->hts", q, k) * scale
    ahead = torch.arange(len(q))[:, None] - torch.arange(len(q))
    hidden = (ahead < 0) | (ahead >= (window or len(q)))
    scores = scores.masked_fill(hidden, -inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(q), 1)], -1)
    weights = scores.softmax(-1)[..., : len(q)]
    return torch.einsum("hts,shd->thd", weights, v)


def convolved(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A causal convolution of each channel [T, C] by [C, 1, W], and silu."""
    width = weight.shape[-1]
    past = torch.cat([x.new_zeros(width - 1, x.shape[1]), x])
    taps = sum(past[tap : tap + len(x)] * weight[:, 0, tap] for tap in range(width))
    return F.silu(taps if bias is None else taps + bias)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """A gated delta net: S ← S·decay; S ← S + k (v - k·S) beta; out = q·S. q, k [T, K, D] are of
    key heads, v [T, V, Dv], decay and beta [T, V] of value heads; value head i reads i // (V / K).
    """
    each = v.shape[1] // k.shape[1]
    q, k = _unit(q), _unit(k)
    q = q.repeat_interleave(each, 1) * q.shape[-1] ** -0.5
    k = k.repeat_interleave(each, 1)
    state = v.new_zeros(v.shape[1], k.shape[-1], v.shape[-1])
    out = []
    for t in range(len(v)):
        state = state * decay[t, :, None, None]
        error = v[t] - torch.einsum("hd,hde->he", k[t], state)
        state = state + torch.einsum("hd,he->hde", k[t], error * beta[t, :, None])
        out.append(torch.einsum("hd,hde->he", q[t], state))
    return torch.stack(out)


def _unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def mamba2(x: Tensor, step: Tensor, a: Tensor, b: Tensor, c: Tensor, skip: Tensor) -> Tensor:
    """S ← S·exp(step·a) + step·x⊗b; out = S·c + skip·x. x [T, H, D]; step [T, H]; a, skip [H];
    b, c [T, N] of one group.
    """
    state = x.new_zeros(*x.shape[1:], b.shape[-1])
    out = []
    for t in range(len(x)):
        state = state * (step[t] * a).exp()[:, None, None]
        state = state + torch.einsum("hd,n->hdn", x[t] * step[t, :, None], b[t])
        out.append(state @ c[t] + skip[:, None] * x[t])
    return torch.stack(out)
