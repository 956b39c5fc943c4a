"""Device memory that the ranks of a group share, and the kernels that run over it.

Connected when the first device call says which device; ranks that cannot share memory find out
together. A kernel that waited in vain leaves its reason in a page of pinned memory, which the host
reads at the next call; a thread watches the peers meanwhile, and tells the kernels through the same
page when one has died or failed.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from tp3.comm.errors import CollectiveTimeout, Disagreement, R4DError
from tp3.comm.layout import DeviceLayout, peers
from tp3.comm.transport.bootstrap import Meeting
from tp3.comm.transport.co_residency import Room, room_for
from tp3.comm.transport.device_memory import DeviceMemory
from tp3.comm.transport.host import HostTransport
from tp3.comm.transport.pairs import Pairs, Probe
from tp3.kernels.launch import Kept

_LOOK_SECONDS = 0.25
_PAGE_WORDS = 1024
_ABORT, _CODE, _KIND, _SEQUENCE, _LATE, _SIZES = 0, 1, 2, 3, 8, 24  # words of the page
_STOP, _HURRY = 1, 2  # what the first may say
_MISMATCH = 2
_KINDS = {1: "one-shot", 2: "two-shot", 3: "sentinel", 4: "exchange"}
_TABLES = 64
_TRIAL_SECONDS = 60.0
_HURRY_SECONDS = 30.0  # ``primitives.HURRY_NS``
_current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", id)


class DeviceTransport:
    """One rank's view of the group's device memory. Calls come from one thread at a time."""

    def __init__(self, meeting: Meeting, host: HostTransport, device: torch.device) -> None:
        self.rank, self.world_size = meeting.rank, meeting.world_size
        self.peers = peers(self.rank, self.world_size)
        self.device = device
        self.layout = DeviceLayout(self.world_size)
        self.target = _target(device)
        self._room = Room(0, 0)
        self._tag = 0
        self._host = host
        self._reason: R4DError | None = None
        self._kept: dict[Any, Kept] = {}
        self._pages = {"calls": Page(), "messages": Page(), "trial": Page(_TRIAL_SECONDS)}
        self._words = self._pages["calls"].words
        self._message_words = self._pages["messages"].words
        self._tables = Tables()
        self._memory = DeviceMemory(meeting, self.layout, device)
        self._pairs = Pairs(meeting, self._memory, self.wrong)
        self._stop = threading.Event()
        self._watcher = threading.Thread(
            target=_watch, args=(weakref.ref(self), self._stop), name="r4d-watch", daemon=True
        )
        self._watcher.start()

    def connect(self, ranks: Collection[int], probe: Callable[[int], Probe]) -> None:
        """Make the memory of ``ranks`` reachable, alike on both ends of each pair.

        probe: starts the self-test with a peer. Errors: R4DError with the reason of either end.
        """
        self._pairs.connect(ranks, probe)

    @property
    def connected(self) -> list[int]:
        """Peers whose memory kernels may use."""
        return self._pairs.connected

    @property
    def mapped(self) -> list[int]:
        """Peers whose memory is mapped here."""
        return self._memory.mapped

    def agree_on_blocks(self) -> None:
        """Settle how many blocks a launch may have. To be called once all peers are connected.

        Errors: R4DError, on all ranks.
        """
        offers = [self._memory.offers[rank] for rank in range(self.world_size)]
        self._room = room_for([(offer.gpu, offer.multiprocessors) for offer in offers])

    def room(self, threads: int, registers: int) -> int:
        """How many blocks of so many threads with so many registers each a launch may have."""
        return self._room.blocks(threads, registers)

    def kernel(self, key: Any, make: Callable[[], Kept]) -> Kept:
        """The kernel made for ``key``; loading it is allowed while a graph is captured."""
        kept = self._kept.get(key)
        if kept is None:
            with self._memory.runtime.relaxed():
                kept = self._kept[key] = make()
        return kept

    def start(self, kept: Kept, grid: tuple[int, int], *args: int, page: str = "calls") -> None:
        """Start a kernel on the current stream; its first argument, the flags, and its last two,
        time limit and page, are added here.

        page: where it reports. "messages" wait half a minute at most once the group is destroyed;
        what is on "trial" waits a minute at most, and fails without failing the group.
        """
        stream, told = _current_stream(self.device.index), self._pages[page]
        limit = int(min(self._host.timeout, told.longest_wait) * 1e9)
        kept(grid, (self._memory.flags, *args, limit, told.address), stream)

    def start_with_table(
        self,
        kept: Kept,
        grid: tuple[int, int],
        rows: Sequence[int],
        place: int,
        *args: int,
        page: str = "calls",
    ) -> None:
        """``start`` with the address of ``rows`` (int64) as argument ``place``; the table stays as
        it is until the kernel has ended, or for ever if it is captured.
        """
        with self._memory.runtime.relaxed():
            address = self._tables.put(rows)
        self.start(kept, grid, *args[:place], address, *args[place:], page=page)
        self._tables.read()

    def next_tag(self) -> int:
        """The number of a collective that moves data, alike on all ranks: what one rank sends and
        the other does not expect is not taken for a later one's.
        """
        self._tag += 1
        return self._tag

    def check(self) -> None:
        """Raise what has gone wrong since the last call. Errors: R4DError, and ever after."""
        told = self._words[_CODE] or self._message_words[_CODE]
        if told or self._reason is not None or self._host.failure is not None:
            self._raise()

    def abort(self, reason: R4DError) -> None:
        """End kernels that wait, and every later one; their outputs are all ones."""
        if self._reason is None:
            self._reason = reason
        self._stop_all()

    def hurry(self) -> None:
        """The group is being destroyed: no message is to wait for longer than half a minute."""
        words = self._message_words
        if words[_ABORT] != _STOP:
            words[_ABORT] = _HURRY

    def unsent(self) -> str:
        """What a message has reported since; "" for nothing."""
        return self._told("messages", _HURRY_SECONDS)

    def wrong(self) -> str:
        """What a kernel has reported on trial; "" for nothing."""
        return self._told("trial", _TRIAL_SECONDS)

    def stop(self) -> None:
        """Watch the peers no longer."""
        self._stop.set()
        if self._watcher is not threading.current_thread():
            self._watcher.join(4 * _LOOK_SECONDS)

    def close(self, *, free: bool) -> None:
        """Unmap, and with ``free`` let the own memory go. No kernel may run. Idempotent."""
        self.stop()
        self._memory.close(free=free)

    def look(self) -> None:
        """What the watching thread does."""
        failure = self._host.failure
        waiting = self._pairs.involved
        problem = R4DError(failure) if failure else self._host.problem(waiting, "device calls")
        if problem is not None:
            self.abort(problem)

    def _stop_all(self) -> None:
        for page in self._pages.values():
            page.words[_ABORT] = _STOP

    def _told(self, page: str, seconds: float) -> str:
        words, limit = self._pages[page].words, min(self._host.timeout, seconds)
        return str(self._error(words, limit)).removeprefix("r4d: ") if words[_CODE] else ""

    def _raise(self) -> None:
        self._stop_all()
        if self._host.failure is not None:
            raise R4DError(f"r4d: the group is unusable since {self._host.failure}")
        words = self._words if self._words[_CODE] else self._message_words
        raise self._host.fail(self._reason or self._error(words, self._host.timeout))

    def _error(self, words: Any, limit: float) -> R4DError:
        kind, sequence = _KINDS[int(words[_KIND])], int(words[_SEQUENCE]) & 0xFFFFFFFF
        late = [rank for rank in range(self.world_size) if words[_LATE + rank]]
        names = ", ".join(map(str, late)) or "(all have arrived since)"
        if words[_CODE] == _MISMATCH:
            sent, expected, tag, wanted = (int(n) for n in words[_SIZES : _SIZES + 8].view("int64"))
            return Disagreement(
                f"r4d: rank {names} sends {sent} bytes (tag {tag}) to rank {self.rank}, which "
                f"expects {expected} bytes (tag {wanted}) (device {kind}, sequence {sequence})"
            )
        return CollectiveTimeout(
            f"r4d: device {kind} (sequence {sequence}) reached its timeout of {limit:g} s on rank "
            f"{self.rank}: rank(s) {names} did not arrive"
        )


class Page:
    """Pinned memory: what kernels report, and what the host tells them. Errors: RuntimeError."""

    def __init__(self, longest_wait: float = math.inf) -> None:
        self.longest_wait = longest_wait
        page = torch.zeros(_PAGE_WORDS, dtype=torch.int32, device="cpu", pin_memory=True)
        self.address, self.words = page.data_ptr(), page.numpy()


class Tables:
    """Small pinned tables of int64, in turn; one is written again only after its reader ended."""

    def __init__(self) -> None:
        self._turn = 0
        self._ring: list[tuple[Tensor, torch.cuda.Event]] = []
        self._captured: list[Tensor] = []

    def put(self, rows: Sequence[int]) -> int:
        """The address of ``rows`` for a kernel that is started next on the current stream."""
        if torch.cuda.is_current_stream_capturing():
            table = torch.tensor(rows, dtype=torch.int64, device="cpu").pin_memory()
            self._captured.append(table)
            return table.data_ptr()
        if len(self._ring) < _TABLES:
            with torch.inference_mode(False):  # else it could not be written outside of that mode
                table = torch.empty(64, dtype=torch.int64, device="cpu", pin_memory=True)
            self._ring.append((table, torch.cuda.Event()))
        else:
            table, event = self._ring[self._turn]
            event.synchronize()
        table[: len(rows)] = torch.tensor(rows, dtype=torch.int64, device="cpu")
        return table.data_ptr()

    def read(self) -> None:
        """To be called once the kernel has been started."""
        if not torch.cuda.is_current_stream_capturing():
            self._ring[self._turn][1].record()
            self._turn = (self._turn + 1) % _TABLES


def _target(device: torch.device) -> str:
    """Which instructions ``kernels.primitives`` is to use."""
    if not torch.version.hip:
        return "cuda"
    name = str(torch.cuda.get_device_properties(device).gcnArchName)
    return "gfx12" if name.startswith("gfx12") else "gfx9"


def _watch(ref: weakref.ref[DeviceTransport], stop: threading.Event) -> None:
    while not stop.wait(_LOOK_SECONDS):
        transport = ref()
        if transport is None:
            return
        transport.look()
        del transport
