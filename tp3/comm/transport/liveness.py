"""Whether a peer's process still runs, from its pid and start time (a pid alone may be reused)."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class ProcessHandle:
    """A process as /proc tells it: ``start`` is its start time in clock ticks after boot."""

    pid: int
    start: int

    @classmethod
    def own(cls) -> ProcessHandle:
        pid = os.getpid()
        fields = _stat(pid)
        assert fields is not None
        return cls(pid, int(fields[19]))

    def alive(self) -> bool:
        """False once the process has ended, also while its parent has not yet collected it."""
        fields = _stat(self.pid)
        return fields is not None and fields[0] not in "ZX" and int(fields[19]) == self.start


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat after the command name: state first, start time at 19."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def pid_namespace() -> str:
    """Pids mean the same to two processes only within one pid namespace."""
    return os.readlink("/proc/self/ns/pid")
