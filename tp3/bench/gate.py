"""The correctness gate: no figure of a sum that is wrong.

W ranks; xs [W, N] are the values of all ranks, which every rank can make. r4d must give the same
bits on all ranks, within (W-1)·2^-24·Σ|x| + u·|Σx| of the sum in fp64: fp32 accumulation and one
rounding, u the unit roundoff of the dtype. Peers may round at every step: W·u·Σ|x|.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

UNIT_ROUNDOFF = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
CHUNK = 1 << 22


@dataclass(frozen=True)
class Verdict:
    """fault: the first element that is not what it must be, in words, or empty."""

    fault: str
    digest: str


def rank_data(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """The Gaussian values of one rank [N], on the CPU."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)


def judge(rank: int, out: Tensor, xs: Tensor, *, exact: bool) -> Verdict:
    """What this rank finds in its sum `out` [N]."""
    digest = hashlib.sha256(out.contiguous().view(torch.uint8).cpu().numpy().tobytes()).hexdigest()
    return Verdict(_wrong(rank, out, xs, exact), digest)


def fault_of(verdicts: list[Verdict], *, exact: bool) -> str:
    """What is wrong with the sums of all ranks, or empty."""
    first = next((verdict.fault for verdict in verdicts if verdict.fault), "")
    differing = [r for r, v in enumerate(verdicts) if v.digest != verdicts[0].digest]
    if exact and differing and not first:
        return f"rank {differing[0]} ended with other bits than rank 0"
    return first


def _wrong(rank: int, out: Tensor, xs: Tensor, exact: bool) -> str:
    unit = UNIT_ROUNDOFF[xs.dtype]
    for start in range(0, out.numel(), CHUNK):
        values = xs[:, start : start + CHUNK].double()
        total, magnitude = values.sum(0), values.abs().sum(0)
        if exact:
            bound = (len(xs) - 1) * 2.0**-24 * magnitude + unit * total.abs()
        else:
            bound = len(xs) * unit * magnitude
        got = out[start : start + CHUNK].double()
        held = (got - total).abs() <= bound  # False for NaN
        if not bool(held.all()):
            at = int((~held).nonzero()[0])
            where = f"rank {rank} element {start + at}"
            return f"{where}: got {float(got[at])}, expected {float(total[at])}"
    return ""
