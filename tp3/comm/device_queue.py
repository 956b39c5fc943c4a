"""Order of device calls on one group: by streams and events, never by making the host wait.

A synchronous call runs on the caller's current stream, an asynchronous one on a side stream that
``wait()`` joins. Kernels of a group must not overlap, so a call on another stream than the last
one's waits for it there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from tp3.comm.transport.streams import streams_of
from tp3.comm.untraced import untraced
from tp3.comm.work import DONE, Recent, Work

_PAUSE_SECONDS = 50e-6
_current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", id)
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", int)
_HERE: AbstractContextManager[None] = nullcontext()


def current(device: torch.device) -> AbstractContextManager[None]:
    """``device`` as the current one: kernels are loaded, and handles opened, on that one."""
    return _HERE if _current_device() == device.index else torch.cuda.device(device)


@untraced
class DeviceWork(Work):
    """A call that has been handed to a stream. ``wait`` makes the current stream wait for it."""

    def __init__(
        self,
        stream: torch.cuda.Stream,
        result: Sequence[Tensor],
        check: Callable[[], None],
        release: Callable[[DeviceWork], None],
    ) -> None:
        super().__init__(result)
        self._release = release
        self._stream = stream
        self._ended = stream.record_event()
        self._check = check
        self._made: torch.futures.Future[list[Tensor]] | None = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Later work on the current stream sees the results. With a timeout the host waits too.

        Errors: R4DError if the group has failed; TimeoutError.
        """
        if timeout.total_seconds() > 0:
            deadline = time.monotonic() + timeout.total_seconds()
            while not self.is_completed():
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"r4d: the work did not end within {timeout.total_seconds():g} s"
                    )
                time.sleep(_PAUSE_SECONDS)
        self._check()
        torch.cuda.current_stream(self._stream.device).wait_event(self._ended)
        self._release(self)
        return True

    def synchronize(self) -> None:
        """Make the host wait until the call has ended (not while a graph is captured)."""
        self.wait()
        if not torch.cuda.is_current_stream_capturing():
            self._ended.synchronize()
            self._check()

    def settle(self) -> None:
        self._ended.synchronize()

    @property
    def ended(self) -> bool:
        return self.is_completed()

    def is_completed(self) -> bool:
        return bool(self._ended.query())

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        try:
            self._check()
        except RuntimeError as error:
            return error
        return None

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        if self._made is None:
            self._made = torch.futures.Future(devices=[self._stream.device])
            with torch.cuda.stream(self._stream):
                self._made.set_result(self._result)
        return self._made


class DeviceQueue:
    """The streams of one group on one device. ``check`` raises what has gone wrong so far."""

    def __init__(self, device: torch.device, check: Callable[[], None]) -> None:
        self._device = device
        self._check = check
        self._lock = threading.RLock()
        self._last: torch.cuda.Stream | None = None
        self._raw: int | None = None  # of the last stream
        self._sides: dict[Any, torch.cuda.Stream] = {}
        # Asynchronous calls that nobody has waited for, with what they use: memory must not be
        # reused before they have ended.
        self._held: dict[DeviceWork, Callable[[], None]] = {}
        self._recent = Recent()

    def submit(self, call: Callable[[], None], result: Sequence[Tensor], *, sync: bool) -> Work:
        """Issue ``call`` after everything the group has issued; ``Done`` when it is in order with
        the current stream.
        """
        self._check()
        with self._lock, current(self._device):
            if not sync:
                return self._beside(call, result, "collectives", ordered=True)
            if self._raw != _current_stream(self._device.index):
                self._follow(torch.cuda.current_stream(self._device))
            call()
        return DONE

    def message(self, call: Callable[[], None], result: Sequence[Tensor], lane: Any) -> Work:
        """Issue ``call`` on a stream of its own lane: messages of one direction between two ranks
        keep their order and nobody else's.
        """
        self._check()
        with self._lock, current(self._device):
            return self._beside(call, result, lane, ordered=False)

    def issued(self) -> torch.cuda.Event:
        """The end of what the current stream has been given."""
        self._check()
        with current(self._device):
            if torch.cuda.is_current_stream_capturing():
                raise ValueError(
                    "r4d: a barrier makes the host wait and cannot be captured in a graph"
                )
            event: torch.cuda.Event = torch.cuda.current_stream().record_event()
        return event

    def drain(self) -> None:
        """Let the host wait for everything that was issued."""
        torch.cuda.synchronize(self._device)
        self._held.clear()
        self.give_back()

    def give_back(self) -> None:
        """Let the streams go, once what runs on them has ended."""
        sides, self._sides, self._last, self._raw = self._sides, {}, None, None
        for side in sides.values():
            side.synchronize()
        if sides:
            streams_of(self._device).give_back(sides.values())

    def _beside(
        self, call: Callable[[], None], result: Sequence[Tensor], lane: Any, *, ordered: bool
    ) -> Work:
        self._forget_ended()
        stream = torch.cuda.current_stream(self._device)
        side = self._sides.get(lane)
        if side is None:
            side = self._sides[lane] = streams_of(self._device).take()
        side.wait_stream(stream)
        with torch.cuda.stream(side):
            if ordered:
                self._follow(side)
            call()
            work = DeviceWork(side, result, self._check, self._release)
        self._held[work] = call
        self._recent.add(work, result)
        return work

    def _follow(self, stream: torch.cuda.Stream) -> None:
        last, self._last, self._raw = self._last, stream, stream.cuda_stream
        if last is None or last == stream:
            return
        # A stream that is captured cannot wait for one that is not, nor the other way round.
        if _capturing(last) == _capturing(stream):
            stream.wait_stream(last)

    def _release(self, work: DeviceWork) -> None:
        self._held.pop(work, None)

    def _forget_ended(self) -> None:
        if not torch.cuda.is_current_stream_capturing():
            for work in [work for work in list(self._held) if work.is_completed()]:
                self._release(work)


def _capturing(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()
