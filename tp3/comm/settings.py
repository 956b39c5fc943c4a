"""Every environment variable that `tp3.comm` reads, and nothing else reads them.

What influences which algorithm runs or how memory is laid out must be the same on every rank: the
whole record is compared at creation (``transport.bootstrap``), and a difference is an error that
names the setting.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields

from tp3.comm.layout import PAGE_BYTES

ALLREDUCE_CHOICES = ("auto", "sentinel", "one-shot", "two-shot")


@dataclass(frozen=True)
class Settings:
    """Choices that all ranks of a group share.

    allreduce: ``auto`` picks by size (``select``), the others force one algorithm where it serves
        (for tests and benchmarks).
    shm_bytes: shared memory that the slots of one group may take, in bytes, and then only if half
        of /dev/shm stays free. They are made when a message needs them; larger messages go through
        in pieces.
    """

    allreduce: str = "auto"
    shm_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        if self.allreduce not in ALLREDUCE_CHOICES:
            allowed = ", ".join(ALLREDUCE_CHOICES)
            raise ValueError(f"TP3_ALLREDUCE is {self.allreduce!r}; allowed: {allowed}")
        if self.shm_bytes < 16 * PAGE_BYTES:
            raise ValueError(
                f"TP3_SHM_BYTES is {self.shm_bytes}; it must be at least {16 * PAGE_BYTES}"
            )

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Settings:
        """Read the settings; ValueError names the variable, what it holds and what is allowed."""
        shm = env.get("TP3_SHM_BYTES", str(cls.shm_bytes))
        if not shm.isdigit():
            raise ValueError(f"TP3_SHM_BYTES is {shm!r}; it must be a whole number of bytes")
        return cls(allreduce=env.get("TP3_ALLREDUCE", cls.allreduce), shm_bytes=int(shm))

    def difference(self, other: Settings) -> str | None:
        """The first setting that differs, ``NAME is a here and b there``; None when all agree."""
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if mine != theirs:
                return f"TP3_{field.name.upper()} is {mine!r} here and {theirs!r} there"
        return None
