"""An all-reduce with what a transformer does next, where possible in one kernel.

The formulas are in ``kernels.normed``. Sums are those of the ``r4d`` backend: in rank order, fp32,
the same bits on all ranks, whichever row of ``select`` carries them.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from tp3.comm.api import arguments as args
from tp3.comm.group import Group
from tp3.comm.select import FUSED
from tp3.kernels.normed import Norm, Normed, check, empty


def all_reduce_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    group: dist.ProcessGroup | None = None,
    plus_one: bool = False,
    quant: str | None = None,
) -> Normed:
    """The sum of x over the ranks, plus residual; RMSNorm of that, in bf16 or FP8.

    x, residual: [M, K] bf16, K a multiple of 8 up to 16384; weight: [K] bf16; residual and weight
    alike on all ranks. plus_one: multiply by 1 + weight. quant: None, "token" (a scale a row) or
    "group" (a scale for each 128 values). The arguments stay as they are. It may be captured in a
    CUDA graph once the group has made a call on the device.
    Errors: ValueError for the arguments, R4DError for what goes wrong between ranks; on a GPU the
    results are then NaN.
    """
    norm = Norm(eps, plus_one, quant)
    args.check((x, residual, weight), FUSED)
    check(x, residual, weight)
    owner, to = _owner(group, x), empty(x, norm)

    def run() -> None:
        owner.open(FUSED, x, x.shape, str(norm))
        owner.launch(FUSED, x, x, residual, weight, norm, to)

    owner.submit(FUSED, run, (), sync=True, on=(x,))
    return to


def _owner(group: dist.ProcessGroup | None, x: Tensor) -> Group:
    chosen: Any = dist.group.WORLD if group is None else group
    if not isinstance(getattr(chosen, "group", None), Group) and chosen is not None:
        chosen = chosen._get_backend(x.device)  # of a group with a backend for each device
    owner = getattr(chosen, "group", None)
    if not isinstance(owner, Group):
        name = "none" if chosen is None else type(chosen).__name__
        raise ValueError(f"{FUSED} got a group of {name}; allowed: a group of the r4d backend")
    return owner
