"""What an asynchronous call returns.

A subclass of ``torch.distributed.Work``: exceptions raised in ``wait`` keep their type through C++
and DDP, which a work made from a failed future would swallow.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from tp3.comm.untraced import untraced

_SMALL_BYTES = 4096
_RECENT = 64


@untraced
class Work(dist.Work):
    """One call in flight. ``result`` is the list of output tensors that ``get_future`` carries."""

    def __init__(self, result: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self._result = list(result)
        self._event = threading.Event()
        self._error: BaseException | None = None
        self._future: torch.futures.Future[list[Tensor]] = torch.futures.Future()

    @property
    def ended(self) -> bool:
        return self._event.is_set()

    def finish(self, error: BaseException | None = None) -> None:
        """Mark the call as ended, by whoever ran it; once. Runs the future's callbacks."""
        self._error = error
        self._event.set()
        if error is None:
            self._future.set_result(self._result)
        else:
            reported = error if isinstance(error, Exception) else RuntimeError(repr(error))
            self._future.set_exception(reported)  # type: ignore[arg-type]

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until the call has ended; raises what it raised.

        TimeoutError after ``timeout`` (0: none of its own, the call's waits are bounded).
        """
        seconds = timeout.total_seconds()
        if not self._event.wait(seconds if seconds > 0 else None):
            raise TimeoutError(f"r4d: the work did not end within {seconds:g} s")
        if self._error is not None:
            raise self._error
        while not self._future.done():  # C++ reads the future as soon as wait() is over
            os.sched_yield()
        return True

    def synchronize(self) -> None:
        self.wait()

    def settle(self) -> None:
        """Make the calling thread wait until the call has ended, well or not, and nothing else."""
        self._event.wait()

    def is_completed(self) -> bool:
        return self._event.is_set()

    def is_success(self) -> bool:
        return self._event.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> list[Tensor]:
        self.wait()
        return self._result

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        return self._future

    def source_rank(self) -> int:
        raise ValueError(
            "source_rank is known for receives only; this work is a collective or a send"
        )

    _source_rank = source_rank


@untraced
class Joined(Work):
    """Several calls as one."""

    def __init__(self, works: Sequence[Work]) -> None:
        super().__init__([tensor for work in works for tensor in work._result])
        self._works = works

    @property
    def ended(self) -> bool:
        return all(work.ended for work in self._works)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for each, for as long as ``timeout``; the future is done afterwards."""
        for work in self._works:
            work.wait(timeout)
        if not self._event.is_set():
            self.finish()
        return True

    def settle(self) -> None:
        for work in self._works:
            work.settle()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        futures = [work.get_future() for work in self._works]
        return torch.futures.collect_all(futures).then(lambda _: self._result)

    def exception(self) -> BaseException | None:
        return next((e for e in (work.exception() for work in self._works) if e), None)


class Recent:
    """Works that C++ may still ask although Python has let go of them: of DDP's join it keeps only
    the C++ half, which is lost without its Python half. They are small, and so is what is kept.
    """

    def __init__(self) -> None:
        self._works: deque[Work] = deque(maxlen=_RECENT)

    def add(self, work: Work, result: Sequence[Tensor]) -> None:
        if sum(tensor.numel() * tensor.element_size() for tensor in result) <= _SMALL_BYTES:
            self._works.append(work)


@untraced
class Done(Work):
    """A call that has ended well: what synchronous calls return."""

    def __init__(self) -> None:
        super().__init__()
        self.finish()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True


DONE = Done()  # one for all synchronous calls: nobody can tell them apart
