"""A rank of the run, and agreement among the ranks: one that cannot do a thing makes all leave it.

The host group is Gloo's: it carries a few words between measurements, never a measured byte.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")
MAX_REASON = 200


@dataclass(frozen=True)
class Rank:
    """This process; `shared` says that several ranks have the same GPU."""

    rank: int
    world_size: int
    device: torch.device
    dtype: torch.dtype
    host: Any
    shared: bool = False
    tiny: Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tiny", torch.zeros(8, device=self.device))

    def wait(self) -> None:
        """Until the device is idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def align(self) -> None:
        """No rank's stream (on a CPU: no rank) passes before every rank has come."""
        dist.all_reduce(self.tiny)

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in rank order; also a barrier of the host."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.host)
        return values

    def attempt(self, build: Callable[[], T]) -> tuple[T | None, str]:
        """What `build` returns, and ""; or None and the first rank's reason if any rank failed."""
        made, reason = None, ""
        try:
            made = build()
        except Exception as error:
            reason = sentence(error)
        first = next((reason for reason in self.gather(reason) if reason), "")
        return (None if first else made), first


def sentence(error: Exception) -> str:
    """The first line of an error, not too long and without a full stop."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join((lines or [type(error).__name__])[0].split()).rstrip(".")
    return text if len(text) <= MAX_REASON else text[: MAX_REASON - 1] + "…"
