"""Rows for the norm's kernels, and the formulas of ``tp3.kernels.normed`` in numpy."""

import numpy as np
import torch

from tests.kernels.sums import Guarded, held, inputs, reduced
from tests.ranks.test_exact import rounded
from tp3.kernels.normed import GROUP, LARGEST_E4M3, SMALLEST_SCALE, Norm, Normed, empty

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
NORMS = [Norm(1e-6, one, quant) for quant in (None, "token", "group") for one in (False, True)]


def values(width, rows=1, salt=0):
    """[rows, width] bf16, of exponents that differ."""
    rng = np.random.default_rng([width, rows, salt])
    spread = np.ldexp(rng.standard_normal((rows, width)), rng.integers(-6, 7, (rows, width)))
    return torch.from_numpy(spread).to(BF16)


def terms(world_size, rows, width, salt=0):
    """x of every rank, [rows, width], whose sum shows its order; and the sum, in bf16."""
    arrays = inputs(BF16, "SUM", world_size, rows * width, salt)
    shape = rows, width
    total = held(reduced(BF16, "SUM", arrays), BF16).view(shape)
    return [held(array, BF16).view(shape) for array in arrays], total


class Placed:
    """Results in poisoned memory, which must stay as it is around them."""

    def __init__(self, x, norm):
        like = empty(x, norm)
        self.places = [None if t is None else Guarded(t.numel(), t.dtype) for t in like]
        views = [t if t is None else p.view.view(t.shape) for p, t in zip(self.places, like)]
        self.normed = Normed(*views)

    def check(self, label, want):
        for name, place, wanted in zip(Normed._fields, self.places, want, strict=True):
            if place is not None:
                place.check(f"{label}, {name}", wanted.flatten())


def wide(tensor):
    return tensor.float().numpy().astype(np.float64)


def kept(y, residual, *, round_first=True):
    """residual_out of a sum y in fp32; not ``round_first``: a wrong order of steps."""
    y = rounded(y, BF16) if round_first else y
    return rounded((y + residual.float().numpy()).astype(np.float32), BF16)


def exact(y, residual, weight, norm):
    """n in fp64, not rounded. y: bf16."""
    v = (y.float().numpy() + residual.float().numpy()).astype(np.float64)
    root = np.sqrt((v * v).mean(-1, keepdims=True) + norm.eps)
    return v / root * (wide(weight) + norm.plus_one)


def codes(n, quant):
    """e4m3 and scales of n [M, K] bf16, by fp32 divisions that numpy rounds and PyTorch's e4m3."""
    n = n.float().numpy()
    scales, rows = [], []
    width = n.shape[1]
    each = GROUP if quant == "group" else width
    for start in range(0, width, each):
        part = n[:, start : start + each]
        scale = np.abs(part).max(-1).astype(np.float32) / np.float32(LARGEST_E4M3)
        scale = np.where(scale < np.float32(SMALLEST_SCALE), np.float32(SMALLEST_SCALE), scale)
        scales.append(scale)
        rows.append(np.clip(part / scale[:, None], -LARGEST_E4M3, LARGEST_E4M3))
    scale = torch.from_numpy(np.stack(scales, 1) if quant == "group" else scales[0])
    return torch.from_numpy(np.concatenate(rows, 1)).to(E4M3), scale


def read(result):
    """What the results mean, in fp64."""
    if result.scale is None:
        return wide(result.out)
    scale = result.scale.double().numpy()
    scale = scale.repeat(GROUP, 1)[:, : result.out.shape[1]] if scale.ndim == 2 else scale[:, None]
    return wide(result.out) * scale
