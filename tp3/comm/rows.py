"""The rows that a group has chosen so far, and how often each has run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import NamedTuple

import torch

from tp3.comm.select import Row, select

_KEPT_ROWS = 4096


class Key(NamedTuple):
    """What the choice depends on beside the group. device: "cpu", "cuda" or "hip"."""

    collective: str
    dtype: torch.dtype
    nbytes: int
    op: str
    device: str


@dataclass(frozen=True)
class Chosen:
    """A row, its name in ``stats``, and what runs it."""

    row: Row
    label: str
    run: Callable[..., None]


class Rows:
    """``choose(key)`` for the ranks of one group; force: the setting TP3_ALLREDUCE."""

    def __init__(self, *, world_size: int, hosts: int, force: str) -> None:
        self._world_size = world_size
        self._hosts = hosts
        self._force = force
        self._chosen: dict[Key, Chosen] = {}
        self.counts: Counter[str] = Counter()

    def choose(self, key: Key, *, reach: bool) -> Chosen:
        """The row that takes such a call. reach: the ranks share device memory."""
        found = self._chosen.get(key)
        if found is None:
            if len(self._chosen) >= _KEPT_ROWS:
                self._chosen.clear()
            row = select(
                key.collective,
                world_size=self._world_size,
                dtype=str(key.dtype)[6:],
                nbytes=key.nbytes,
                device=key.device,
                reach=reach,
                hosts=self._hosts,
                op=key.op,
                force=self._force,
            )
            label = f"{key.collective}/{row.name}"
            found = self._chosen[key] = Chosen(row, label, _launcher(row, key.collective))
        return found


@lru_cache(maxsize=256)
def _launcher(row: Row, collective: str) -> Callable[..., None]:
    module, function = row.launcher.format(collective=collective).split(":")
    found: Callable[..., None] = getattr(import_module(module), function)
    return found
