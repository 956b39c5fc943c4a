"""Point-to-point messages: posted here, moved through ``rings`` by whoever waits.

``isend`` and ``irecv`` never block: what does not fit at once is moved on by a thread that runs
only while something is pending and nobody waits.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tp3.comm import monitored
from tp3.comm.errors import CollectiveTimeout, R4DError
from tp3.comm.message import ANY_SOURCE, Message
from tp3.comm.rings import Rings
from tp3.comm.transport.host import HostTransport

_SPIN_SECONDS = 1e-3
_PAUSE_SECONDS = 100e-6  # of a waiting caller that has spun in vain
_IDLE_SECONDS = 500e-6  # of the thread, while nothing moves
_LOOK_SECONDS = 0.1


class Channels:
    """All point-to-point traffic of one rank in a group. Thread-safe."""

    def __init__(self, transport: HostTransport) -> None:
        self._transport = transport
        self.timeout = transport.timeout
        self.peers = transport.peers
        self._lock = threading.Lock()
        self._rings = Rings(transport)
        self._waiters = 0
        self._closed = False
        self._monitored = 0
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Alone with the rings. Messages end once they are released: callbacks may send again."""
        try:
            with self._lock:
                yield
        finally:
            while self._rings.ended:
                message, error = self._rings.ended.popleft()
                message.finish(error)

    def post(self, message: Message) -> Message:
        """Start a message; it has ended already if it could be moved at once."""
        message.channels = self
        with self._exclusive():
            if self._transport.failure is not None:
                raise R4DError(f"r4d: the group is unusable since {self._transport.failure}")
            self._rings.add(message)
            self._rings.progress()
        if not message.ended:
            self._ensure_thread()
        return message

    def progress(self) -> bool:
        """Move on whatever can be moved; whether anything did."""
        with self._exclusive():
            return self._rings.progress()

    def cancel(self, message: Message) -> None:
        """Stop waiting for a receive; what comes for it later stays on the heap."""
        with self._lock:
            self._rings.cancel(message)

    def drive(self, message: Message, timeout: float) -> None:
        """Move messages on until this one has ended; raises when a peer is gone or time is up."""
        with self._lock:
            self._waiters += 1
        try:
            start = look = moved = time.monotonic()
            while not message.ended:
                now = time.monotonic()
                if self.progress():
                    moved = now
                    continue
                if now - moved < _SPIN_SECONDS:
                    os.sched_yield()
                    continue
                time.sleep(_PAUSE_SECONDS)
                if now - look > _LOOK_SECONDS or now - start > timeout:
                    look = now
                    self._look(message, now - start, timeout)
        finally:
            with self._lock:
                self._waiters -= 1

    def monitored_barrier(self, seconds: float, *, wait_all_ranks: bool) -> None:
        """A barrier whose rank 0 names who did not come in time; the group stays usable."""
        self._monitored += 1
        rank = self._transport.rank
        monitored.barrier(self, rank, self._monitored, seconds, wait_all_ranks)

    def close(self) -> None:
        """End the thread and let go of the rings. Pending messages end with an error."""
        with self._lock:
            self._closed = True
            self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=5)
        with self._exclusive():
            self._rings.end_all(
                R4DError("r4d: the group was destroyed while a message was pending")
            )
            self._rings.release()

    def fail(self, error: R4DError) -> None:
        """End all pending messages with ``error``."""
        with self._exclusive():
            self._rings.end_all(error)

    def _look(self, message: Message, waited: float, timeout: float) -> None:
        transport = self._transport
        anyone = message.peer == ANY_SOURCE
        waiting = transport.peers if anyone else (message.peer,)
        error = transport.problem(waiting, message.describe(), any_of=anyone)
        if error is None and waited > timeout:
            verb = "receive" if message.kind == "send" else "send"
            error = CollectiveTimeout(
                f"r4d: {message.describe()} reached its timeout of {timeout:g} s on rank "
                f"{transport.rank}: rank(s) {', '.join(map(str, waiting))} did not {verb}"
            )
        if error is None:
            return
        with self._exclusive():
            # What came while we looked counts: a peer may have sent its last word and left.
            self._rings.progress()
            if message in self._rings.pending():
                self._rings.end_all(transport.fail(error))

    def _ensure_thread(self) -> None:
        self._wake.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="r4d-p2p", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while not self._closed:
            self._wake.wait()
            try:
                idle = bool(self._waiters) or not self.progress()
            except Exception as error:
                self.fail(self._transport.fail(R4DError(f"r4d: {type(error).__name__}: {error}")))
                raise
            if idle:
                time.sleep(_IDLE_SECONDS)
            with self._lock:
                if not self._closed and not any(self._rings.pending()):
                    self._wake.clear()
