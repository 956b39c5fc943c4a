"""What torch before 2.14 keeps from groups that are written in Python.

Installed when the first r4d group is made; nothing changes for other backends, and from 2.14 on
nothing is touched.

* ``dist.monitored_barrier`` refuses every backend but Gloo by name, although the group has it.
* ``_c10d_functional.all_gather_into_tensor_out`` (what inductor makes of an all-gather) asks the
  group for a C++ backend. The kernel here does what torch's does, on the group itself.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from tp3.comm.calls import Calls


@functools.cache
def install() -> None:
    """Close both gaps where they are open. Idempotent."""
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14):
        _open_monitored_barrier()
        _open_all_gather_out()


def _open_monitored_barrier() -> None:
    refusing = c10d.monitored_barrier

    @functools.wraps(refusing)
    def monitored_barrier(
        group: Any = None, timeout: Any = None, wait_all_ranks: bool = False
    ) -> None:
        used = c10d._get_default_group() if group is None else group
        if isinstance(used, Calls):
            used.monitored_barrier(timeout, wait_all_ranks)
        else:
            refusing(group, timeout, wait_all_ranks)

    c10d.monitored_barrier = dist.monitored_barrier = monitored_barrier


def _open_all_gather_out() -> None:
    from torch._C._distributed_c10d import (
        AllgatherOptions,
        _register_work,
        _resolve_process_group,
    )

    @torch.library.impl("_c10d_functional::all_gather_into_tensor_out", ("CPU", "CUDA"))
    def all_gather_into_tensor_out(
        input: Tensor, group_size: int, group_name: Any, *, out: Tensor
    ) -> Tensor:
        group = _resolve_process_group(group_name)
        options = AllgatherOptions()
        options.asyncOp = not isinstance(group, Calls)  # C++ would keep half of an r4d work
        work = group._allgather_base(out, input, options)
        if options.asyncOp:
            _register_work(out, work)
        return out
