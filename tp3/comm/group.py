"""One rank of a process group: runs calls in turn, picks their row, and ends.

A call travels: ``calls`` (torch's names) → ``api`` (checks) → ``Group`` (order) → ``select`` (row)
→ ``collectives`` (rounds) → ``transport`` (memory) → ``Work``. Errors: ValueError for what the
caller passed, before anything has moved; ``errors.R4DError`` for what went wrong between ranks,
after which the group is unusable.
"""

from __future__ import annotations

import atexit
import os
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from tp3.comm.connect import connect
from tp3.comm.errors import Disagreement, R4DError
from tp3.comm.executor import Executor
from tp3.comm.select import Row, select
from tp3.comm.signature import signature
from tp3.comm.work import Work


@lru_cache(maxsize=256)
def _launcher(row: Row, collective: str) -> Callable[..., None]:
    module, function = row.launcher.format(collective=collective).split(":")
    found: Callable[..., None] = getattr(import_module(module), function)
    return found


_EXIT_SECONDS = 1.0
_KEPT_ROWS = 4096
_OPEN: weakref.WeakSet[Group] = weakref.WeakSet()


@atexit.register
def _leave_all() -> None:
    """Threads must be out of C++ before the interpreter ends, or the process aborts."""
    for group in list(_OPEN):
        group.leave()


class Group:
    """The state of one group on one rank. Ranks are group ranks.

    transport: what collectives run over. channels: what messages run over.
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        world_size: int,
        timeout: timedelta,
        name: str = "r4d",
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank is {rank}; it must be in 0..{world_size - 1}")
        self.rank = rank
        self.world_size = world_size
        self.ranks = range(world_size)
        self.timeout = timeout
        self._pid = os.getpid()
        self._closed = False
        self._counts: Counter[str] = Counter()
        connection = connect(store, rank=rank, world_size=world_size, timeout=timeout)
        self.transport = connection.transport
        self.channels = connection.channels
        self._settings = connection.settings
        self._executor = Executor(f"r4d-{name}")
        _OPEN.add(self)
        self._rows: dict[tuple[str, torch.dtype, int, str], Row] = {}

    @property
    def calls(self) -> int:
        """Collectives so far."""
        return self.transport.calls

    @property
    def hosts(self) -> int:
        """Number of hosts; the ranks of one share memory."""
        return self.transport.hosts

    def stats(self) -> dict[str, int]:
        """Launches so far by ``collective/algorithm``."""
        return dict(self._counts)

    def set_timeout(self, timeout: timedelta) -> None:
        """Bound every wait from now on."""
        self.timeout = timeout
        self.transport.set_timeout(timeout.total_seconds())
        self.channels.timeout = timeout.total_seconds()

    def abort(self, reason: str = "aborted by the user") -> None:
        """Release every peer that waits for this rank; the group is unusable afterwards."""
        if not self._closed and os.getpid() == self._pid:
            self.transport.abort(f"r4d: {reason}")

    def close(self) -> None:
        """End queued calls and let the memory go. Idempotent; inert in a forked child."""
        if self._closed:
            return
        self._closed = True
        if os.getpid() == self._pid:
            self._release(self.timeout.total_seconds())

    def leave(self) -> None:
        """``close`` at the end of the process: calls that are pending then end with an error."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        if self._executor.queued:
            self.transport.fail(R4DError("r4d: the process exits"))
        self._release(_EXIT_SECONDS)

    def _release(self, timeout: float) -> None:
        # A call that outlives the timeout still uses the memory, which is then left mapped.
        if self._executor.close(timeout):
            self.channels.close()
            self.transport.close()

    def check_open(self) -> None:
        """Raise R4DError in a forked child or after ``close``."""
        if os.getpid() != self._pid:
            raise R4DError(
                f"r4d: this group belongs to process {self._pid}; its forked child {os.getpid()} "
                "has to make its own"
            )
        if self._closed:
            raise R4DError("r4d: the group is unusable since it was destroyed")

    def submit(self, run: Callable[[], None], result: Sequence[Tensor], *, sync: bool) -> Work:
        """Run a call in its turn. sync: it has ended on return; otherwise a ``Work`` at once."""
        self.check_open()
        return self._executor.submit(lambda: self._guarded(run), result, sync=sync)

    def open(
        self,
        kind: str,
        dtype: torch.dtype | None = None,
        shape: Sequence[int] | None = None,
        op: str = "",
        root: int | None = None,
        sizes: Sequence[int] = (),
    ) -> None:
        """Say what is called: compared between ranks in its first round. ``sizes`` may differ."""
        text = signature(kind, dtype, None if shape is None else tuple(shape), op, root)
        self.transport.open_call(text, sizes)

    def exchange(self, count: int) -> list[tuple[int, ...]]:
        """A round without data; the first ``count`` sizes that each rank opened the call with."""
        self.transport.barrier()
        return [self.transport.sizes_of(rank, count) for rank in self.ranks]

    def agree(
        self, what: str, tensor: Tensor, sender: int, sent: int, receiver: int, expected: int
    ) -> None:
        """Raise Disagreement unless the bytes sent are those expected."""
        if sent == expected:
            return
        each, dtype = tensor.element_size(), str(tensor.dtype)[6:]
        raise self.transport.fail(
            Disagreement(
                f"r4d: {what}: rank {sender} sends {dtype}[{sent // each}] to rank {receiver}, "
                f"which expects {dtype}[{expected // each}]"
            )
        )

    def launch(self, collective: str, tensor: Tensor, *args: Any, op: str = "SUM") -> None:
        """Run the algorithm that ``select`` picks for ``tensor`` on ``args``."""
        nbytes = tensor.numel() * tensor.element_size()
        key = (collective, tensor.dtype, nbytes, op)
        row = self._rows.get(key)
        if row is None:
            if len(self._rows) >= _KEPT_ROWS:
                self._rows.clear()
            row = self._rows[key] = self._select(*key)
        self._counts[f"{collective}/{row.name}"] += 1
        _launcher(row, collective)(self.transport, *args)

    def _select(self, collective: str, dtype: torch.dtype, nbytes: int, op: str) -> Row:
        return select(
            collective,
            world_size=self.world_size,
            dtype=str(dtype)[6:],
            nbytes=nbytes,
            hosts=self.hosts,
            op=op,
            force=self._settings.allreduce,
        )

    def _guarded(self, run: Callable[[], None]) -> None:
        """Peers must not wait for a rank that was interrupted in the middle of a call."""
        try:
            run()
        except BaseException as error:
            if not isinstance(error, R4DError):
                self.transport.fail(R4DError(f"r4d: {type(error).__name__}: {error}"))
            self.channels.fail(
                R4DError(f"r4d: the group is unusable since {self.transport.failure}")
            )
            raise
