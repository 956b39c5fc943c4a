"""A fused collective in its separate steps, wherever the fused kernel does not run; same bits."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from tp3.comm.reduce import reduction_of
from tp3.comm.tensors import copy_back, flat, write
from tp3.kernels import reference
from tp3.kernels.normed import Norm, Normed


class Launching(Protocol):
    """What runs a collective by its row of the table."""

    def launch(self, collective: str, tensor: Tensor, *args: Any, op: str = "SUM") -> None: ...


def all_reduce_rms_norm(
    group: Launching, x: Tensor, residual: Tensor, weight: Tensor, norm: Norm, to: Normed
) -> None:
    """The sum of ``x`` [M, K] by all-reduce, of which PyTorch (on a GPU a kernel) makes ``to``."""
    y = x.detach().clone(memory_format=torch.contiguous_format)
    reduction = reduction_of("SUM", x.dtype)
    data = flat(y, reduction.storage)
    group.launch("all_reduce", y, data, reduction)
    copy_back(y, data)
    if y.device.type == "cpu":
        for target, result in zip(to, reference.add_rms_norm(y, residual, weight, norm)):
            if target is not None and result is not None:
                write(target, result)
    else:
        from tp3.kernels.norm import add_rms_norm  # here: it needs triton

        add_rms_norm(y, residual, weight, norm, to)
