"""vLLM's CUDA communicator whose all-reduce runs on r4d. Imported by vLLM, where r4d carries.

Everything else goes where vLLM sends it: PyNccl, or the device group, which is r4d's too, where
NCCL is off because ranks share a GPU.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator


class R4DCudaCommunicator(CudaCommunicator):  # type: ignore[misc]
    """Out-of-place all-reduce: the input stays, as vLLM's custom op promises."""

    def all_reduce(self, input_: Tensor) -> Tensor:
        out = torch.empty_like(input_)
        if not self.device_group.group.repeat(input_, "SUM", out):
            out.copy_(input_)
            dist.all_reduce(out, group=self.device_group)
        return out
