"""The adapter to torch: a Python subclass of ``ProcessGroup``, on every torch from 2.11 on.

From 2.14 on a subclass of ``Backend`` is possible too, but what torch then hands to the caller
forwards ``wait`` and ``get_future`` of a work only: ``is_completed`` stays False for ever, and a
receive from any source does not know its sender (``PyWorkHolder``, read in 2.14.1).

Such a group stands for all its devices; torch looks some things up on it that a C++ group finds in
its backend.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from tp3.comm.calls import Calls
from tp3.comm.compat import install
from tp3.comm.group import Group
from tp3.comm.registration import NAME
from tp3.comm.untraced import untraced
from tp3.comm.work import Work


@untraced
class ProcessGroupR4D(Calls, dist.ProcessGroup):  # type: ignore[misc]
    """A process group whose collectives run on ``Group``."""

    supports_splitting = False
    supports_coalescing = False
    supports_tensor_alloc = False

    def __init__(self, options: Any) -> None:
        install()
        rank_and_size: Any = (options.group_rank, options.group_size)
        dist.ProcessGroup.__init__(self, *rank_and_size)
        self._store: Store = options.store
        self._name = str(options.group_id)
        self._description = "undefined"
        self.bound_device_id = None
        self.group = Group(
            options.store,
            rank=options.group_rank,
            world_size=options.group_size,
            timeout=options.timeout,
            name=self._name,
        )

    def getBackendName(self) -> str:
        return NAME

    def name(self) -> str:
        return NAME

    def getRank(self) -> int:
        return self.group.rank

    def getSize(self) -> int:
        return self.group.world_size

    rank = getRank
    size = getSize

    def _set_group_name(self, name: str) -> None:
        self._name = name

    setGroupName = _set_group_name

    def getGroupName(self) -> str:
        return self._name

    @property
    def group_name(self) -> Any:
        return self._name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    setGroupDesc = _set_group_desc

    def getGroupDesc(self) -> str:
        return self._description

    @property
    def group_desc(self) -> str:
        return self._description

    def get_group_store(self) -> Store:
        return self._store

    def _get_backend(self, device: torch.device) -> Any:
        return self

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]

    def _get_sequence_number_for_group(self) -> int:
        return self.group.calls

    def _set_sequence_number_for_group(self) -> None:
        """Sequence numbers start with the group."""

    def _start_coalescing(self, device: torch.device) -> None:
        self.group.start_coalescing()

    def _end_coalescing(self, device: torch.device) -> Work:
        return self.group.end_coalescing()

    def set_timeout(self, timeout: timedelta) -> None:
        self.group.set_timeout(timeout)

    _set_default_timeout = set_timeout

    def abort(self) -> None:
        self.group.abort()

    def shutdown(self) -> None:
        self.group.close()
