"""Order of calls on one group: as issued, whether synchronous or not.

A synchronous call runs on the caller's thread when nothing is queued; an asynchronous one is queued
for a thread of the group, which is started by the first of them.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

from torch import Tensor

from tp3.comm.work import DONE, Recent, Work

Item = tuple[Callable[[], None], Work]


class Executor:
    """Runs the calls of one group one after another. Thread-safe."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._running = threading.RLock()
        self._counting = threading.Lock()
        self._queued = 0
        self._calls: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._recent = Recent()

    def submit(self, call: Callable[[], None], result: Sequence[Tensor], *, sync: bool) -> Work:
        """Run ``call`` in its turn. Synchronous: it has ended (or raised) on return."""
        if sync and not self._queued:
            with self._running:
                call()
            return DONE
        work = Work(result)
        self._recent.add(work, result)
        with self._counting:
            self._queued += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._calls.put((call, work))
        if threading.current_thread() is self._thread:
            self._drain(work)
        if sync:
            work.wait()
        return work

    @property
    def queued(self) -> int:
        """Asynchronous calls that have not ended."""
        return self._queued

    def close(self, timeout: float) -> bool:
        """Let calls end, then stop the thread; False when one still runs. Idempotent."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            self._calls.put(None)
            thread.join(timeout)
            if thread.is_alive():
                return False
        idle = self._running.acquire(timeout=timeout)
        if idle:
            self._running.release()
        return idle

    def _drain(self, work: Work) -> None:
        """A callback of a future issued ``work`` on this thread: what it may wait for runs now."""
        stop = False
        while not work.ended:
            item = self._calls.get()
            if item is None:
                stop = True
            else:
                self._step(*item)
        if stop:
            self._calls.put(None)

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            self._step(*item)

    def _step(self, call: Callable[[], None], work: Work) -> None:
        error: BaseException | None = None
        try:
            with self._running:
                call()
        except BaseException as caught:
            error = caught
        with self._counting:
            self._queued -= 1
        work.finish(error)
