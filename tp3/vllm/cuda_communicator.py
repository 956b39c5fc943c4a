"""vLLM's CUDA communicator whose all-reduce runs on r4d. Imported by vLLM, where r4d carries.

Everything else goes where vLLM sends it: PyNccl, or the device group, which is r4d's too, where
NCCL is off because ranks share a GPU. Three collectives know PyNccl alone: without it vLLM's
broadcast refuses, and its reduce-scatters leave their output as it was allocated (0.26 to 0.33).
The base has all but the uneven reduce-scatter, which it refuses.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator


class R4DCudaCommunicator(CudaCommunicator):  # type: ignore[misc]
    """Out-of-place all-reduce: the input stays, as vLLM's custom op promises."""

    def all_reduce(self, input_: Tensor) -> Tensor:
        out = torch.empty_like(input_)
        if not self.device_group.group.repeat(input_, "SUM", out):
            out.copy_(input_)
            dist.all_reduce(out, group=self.device_group)
        return out

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        out: Tensor = self._carrier().broadcast(self, tensor, src)
        return out

    def reduce_scatter(self, input_: Tensor, dim: int = -1) -> Tensor:
        out: Tensor = self._carrier().reduce_scatter(self, input_, dim)
        return out

    def reduce_scatterv(self, input_: Tensor, dim: int = -1, sizes: Any = None) -> Tensor:
        out: Tensor = self._carrier().reduce_scatterv(self, input_, dim, sizes)
        return out

    def _carrier(self) -> Any:
        """The class whose methods serve: vLLM's for CUDA, or its base over the device group."""
        nccl = self.pynccl_comm
        return DeviceCommunicatorBase if nccl is None or nccl.disabled else CudaCommunicator
