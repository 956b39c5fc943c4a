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
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import DebugLevel, Store, get_debug_level

from tp3.comm import profiling
from tp3.comm.connect import connect
from tp3.comm.errors import Disagreement, R4DError
from tp3.comm.executor import Executor
from tp3.comm.loopback import Loopback
from tp3.comm.rows import Chosen, Key, Rows
from tp3.comm.signature import signature
from tp3.comm.tensors import is_dense_vectors, one_device
from tp3.comm.transport.bootstrap import Meeting
from tp3.comm.work import Joined, Work

if TYPE_CHECKING:
    from tp3.comm.device import DeviceSide
    from tp3.comm.device_queue import DeviceQueue


_EXIT_SECONDS = 1.0
_MOST_COALESCED = 1024  # then those that have ended are left out: an error may have left it open
_OPEN: weakref.WeakSet[Group] = weakref.WeakSet()


@atexit.register
def _leave_all() -> None:
    """Threads must be out of C++ before the interpreter ends, or the process aborts."""
    for group in list(_OPEN):
        group.leave()


class Group:
    """The state of one group on one rank. Ranks are group ranks.

    transport: what collectives on the host run over. channels: what messages there run over.
    loopback: messages to itself, anywhere.
    The device half is made by the first call with a device tensor.
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
        self._meeting = Meeting(store=store, rank=rank, world_size=world_size, timeout=timeout)
        self._device: DeviceSide | None = None
        self._detail = get_debug_level() == DebugLevel.DETAIL
        self._device_calls = 0
        connection = connect(self._meeting)
        self.transport = connection.transport
        self.channels = connection.channels
        self.loopback = Loopback(rank)
        self._rows = Rows(
            world_size=world_size,
            hosts=self.transport.hosts,
            force=connection.settings.allreduce,
        )
        self._executor = Executor(f"r4d-{name}")
        _OPEN.add(self)
        self._coalesced: list[Work] | None = None
        self._unopened: Callable[[], None] | None = None  # a device call's way to the host
        self._staged: Key | None = None  # and what it is

    @property
    def calls(self) -> int:
        """Collectives so far."""
        return self.transport.calls + self._device_calls

    @property
    def hosts(self) -> int:
        """Number of hosts; the ranks of one share memory."""
        return self.transport.hosts

    def stats(self) -> dict[str, int]:
        """Launches so far by ``collective/algorithm``."""
        return dict(self._rows.counts)

    def set_timeout(self, timeout: timedelta) -> None:
        """Bound every wait from now on."""
        self.timeout = timeout
        self.transport.set_timeout(timeout.total_seconds())
        self.channels.timeout = timeout.total_seconds()

    def abort(self, reason: str = "aborted by the user") -> None:
        """Release every peer that waits for this rank; the group is unusable afterwards."""
        if not self._closed and os.getpid() == self._pid:
            self.transport.abort(f"r4d: {reason}")
            if self._device is not None:
                self._device.abort(R4DError(f"r4d: {reason}"))

    def close(self) -> None:
        """End queued calls and let the memory go. Idempotent; inert in a forked child."""
        if self._closed:
            return
        self._closed = True
        if os.getpid() != self._pid:
            return
        try:
            if self._device is not None:
                self._device.close(self.timeout.total_seconds())
        finally:
            self._release(self.timeout.total_seconds())

    def leave(self) -> None:
        """``close`` at the end of the process: calls that are pending then end with an error."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        if self._executor.queued:
            self.transport.fail(R4DError("r4d: the process exits"))
        if self._device is not None:
            self._device.leave()
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

    def submit(
        self,
        name: str,
        run: Callable[[], None],
        result: Sequence[Tensor],
        *,
        sync: bool,
        on: Sequence[Tensor] = (),
    ) -> Work:
        """Run a call in its turn. sync: it has ended on return, or on a device is in order with the
        current stream; otherwise a ``Work`` at once. on: tensors of the call, which say where.
        """
        self.check_open()
        device = one_device(on)
        queue: Executor | DeviceQueue = self._executor
        if device is not None:
            side = self.device_side(device)
            side.reachable()
            queue = side.queue

        def call() -> Work:
            return queue.submit(lambda: self._guarded(run), result, sync=sync)

        work = profiling.recorded(name, call, sync=sync) if profiling.enabled() else call()
        return self.note(work)

    def note(self, work: Work) -> Work:
        """To be called with the work of each call: calls may be coalesced."""
        if self._coalesced is not None:
            self._coalesced.append(work)
            if len(self._coalesced) > _MOST_COALESCED:
                self._coalesced = [each for each in self._coalesced if not each.is_completed()]
        return work

    def start_coalescing(self) -> None:
        """Calls from here on, which run as they are made, are one work at the end."""
        self._coalesced = []

    def end_coalescing(self) -> Work:
        works, self._coalesced = self._coalesced or [], None
        return Joined(works)

    def repeat(self, tensor: Tensor, op: str, out: Tensor | None = None) -> bool:
        """All-reduce ``tensor`` as one like it was before, past all that was settled then; False if
        there was none. out: where the sum goes, another tensor of the same layout; by default in
        place.
        """
        side = self._device
        if side is None or tensor.device != side.device or profiling.enabled():
            return False
        known = side.known.get((tensor.dtype, tensor.numel(), op))
        if known is None or not is_dense_vectors(tensor):
            return False
        target = tensor if out is None else out
        if not is_dense_vectors(target):
            return False
        self.check_open()
        plan, label = known
        self._device_calls += 1
        self._rows.counts[label] += 1
        side.queue.submit(lambda: self._guarded(lambda: plan.start(tensor, target)), (), sync=True)
        return True

    def device_side(self, device: torch.device) -> DeviceSide:
        """The device half, made for the device that the first call names."""
        if self._device is None:
            from tp3.comm.device import DeviceSide  # here: it needs triton

            self._device = DeviceSide(self._meeting, self.transport, device)
        if self._device.device != device:
            raise ValueError(
                f"r4d: got a tensor on {device}; this group uses {self._device.device}, one device "
                "per rank"
            )
        return self._device

    def device_event(self) -> torch.cuda.Event | None:
        """The end of what the current stream has been given; None where no device is used."""
        if self._device is None:
            return None
        return self._device.queue.issued()

    def open(
        self,
        kind: str,
        like: Tensor | None = None,
        shape: Sequence[int] | None = None,
        op: str = "",
        root: int | None = None,
        sizes: Sequence[int] = (),
    ) -> None:
        """Say what is called on tensors ``like`` this. On the host it is compared between ranks in
        the call's first round; on a device with TORCH_DISTRIBUTED_DEBUG=DETAIL, over the host.
        ``sizes`` may differ.
        """
        dtype = None if like is None else like.dtype

        def text() -> bytes:
            return signature(kind, dtype, None if shape is None else tuple(shape), op, root)

        if like is None or like.device.type == "cpu":
            self.transport.open_call(text(), sizes)
            return
        self._unopened = lambda: self.transport.open_call(text(), sizes)
        assert self._device is not None
        if not self._device.reachable():
            self._open_on_host()
            return
        if self._detail:
            self._on_host(lambda: (self.transport.open_call(text()), self.transport.barrier()))
        else:
            self._device_calls += 1

    def exchange(self, count: int, like: Tensor | None = None) -> list[tuple[int, ...]]:
        """A round without data; the first ``count`` sizes that each rank opened the call with.

        Empty for a call that runs on a device, whose kernels look at the sizes themselves.
        """
        if like is None or like.device.type == "cpu":
            self.transport.barrier()
        elif self._unopened is not None:
            return []
        else:
            self._on_host(self.transport.barrier)
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
        side = self._device
        device = "cpu" if tensor.device.type == "cpu" or side is None else side.kind
        nbytes = tensor.numel() * tensor.element_size()
        key = Key(collective, tensor.dtype, nbytes, op, device)
        chosen = self._choose(key)
        self._rows.counts[chosen.label] += 1
        if chosen.row.medium == "host":
            chosen.run(self.transport, *args)
        elif chosen.row.medium == "device":
            assert side is not None
            chosen.run(side.transport, *args)
            if collective == "all_reduce" and not self._detail:
                side.remember(chosen, tensor, args[1])
        else:
            self._staged = key
            chosen.run(self, *args)

    def run_on_host(self, args: list[Any]) -> None:
        """Run the host's algorithm for the device call at hand (``collectives.staged``)."""
        assert self._staged is not None
        chosen = self._choose(self._staged._replace(device="cpu"))
        if self._unopened is not None:
            self._open_on_host()
        self._on_host(lambda: chosen.run(self.transport, *args))

    def _choose(self, key: Key) -> Chosen:
        side = self._device
        return self._rows.choose(key, reach=side is not None and side.problem is None)

    def _open_on_host(self) -> None:
        step, self._unopened = self._unopened, None
        assert step is not None
        self._on_host(step)

    def _on_host(self, step: Callable[[], Any]) -> None:
        self._executor.submit(step, (), sync=True)

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
