"""Rounds over the segment that the ranks of one host share: write your slot, publish, wait, read
the peers'.

Ordering: a rank stores its slot (and header), then a fence, then its flag; a waiting rank loads the
flag, then a fence, then the slots. Why a slot may be written again is argued in ``layout``.

The first round of a call carries its signature; every rank compares all of them before it reads a
byte of data, so calls that differ end as ``Disagreement`` on every rank.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tp3.comm.errors import (
    CollectiveTimeout,
    Disagreement,
    PeerDied,
    PeerFailed,
    R4DError,
)
from tp3.comm.layout import (
    LINE_BYTES,
    REASON_BYTES,
    SEQUENCE_MASK,
    SIGNATURE_BYTES,
    HostLayout,
    peers,
    reached,
)
from tp3.comm.tensors import Array
from tp3.comm.transport.liveness import ProcessHandle
from tp3.comm.transport.ordering import make_fence
from tp3.comm.transport.slots import Slots, grown, unmap

_HALF = 0x8000_0000
_WORDS_PER_LINE = LINE_BYTES // 4
_ACTIVE, _LEFT, _FAILED = range(3)
# The counter wraps 256 rounds into every run, so that a wrap is nothing rare.
FIRST_SEQUENCE = SEQUENCE_MASK - 256
_SPIN_SECONDS = 1e-3  # then sleep: a peer may be loading a model
_YIELDS = 16  # between looks at the clock; on a busy machine each may give away a time slice
_PAUSE_SECONDS = (20e-6, 500e-6)
_LOOK_SECONDS = 0.1  # how often a sleeping rank looks whether its peers still run


class HostTransport:
    """One rank's view of the shared segment of a group on this host.

    Not thread-safe: ``Executor`` serialises callers. ``timeout`` bounds every wait, in seconds;
    ``budget_bytes`` is what larger slots may take together.
    """

    hosts = 1

    def __init__(
        self,
        memory: mmap.mmap,
        layout: HostLayout,
        *,
        rank: int,
        processes: Sequence[ProcessHandle | None],
        timeout: float,
        budget_bytes: int = 0,
        first_sequence: int | None = None,
    ) -> None:
        assert len(processes) == layout.world_size
        self.rank = rank
        self.world_size = layout.world_size
        self.layout = layout
        self.peers = peers(rank, self.world_size)
        self.peers_from_here = self.peers[rank:] + self.peers[:rank]
        self.timeout = timeout
        self.calls = 0
        self.failure: str | None = None
        self._closed = False
        self._processes = processes
        self._memory = memory
        self._view = memoryview(memory)
        self._flags = self._view[: layout.status(0)].cast("I")
        self._lines = tuple(peer * _WORDS_PER_LINE for peer in self.peers)
        self._fence = make_fence()
        first = FIRST_SEQUENCE if first_sequence is None else first_sequence
        self._sequence = first & SEQUENCE_MASK
        self._flags[rank * _WORDS_PER_LINE] = self._sequence
        self._headers = [
            [layout.header(r, parity) for r in range(self.world_size)] for parity in (0, 1)
        ]
        self._signature: bytes | None = None
        self._agreeing = False
        self._text = "creation"
        self._slots = Slots(memory, layout.slot(0, 0), layout.slot_bytes)
        self._slots_memory: mmap.mmap | None = None
        self._budget_bytes = budget_bytes
        self._largest = self.world_size == 1

    @property
    def slot_bytes(self) -> int:
        return self._slots.nbytes

    def open_call(self, signature: bytes, sizes: Sequence[int] = ()) -> None:
        """Start a call: the next round carries ``signature`` (equal on all ranks) and ``sizes``
        (may differ).
        """
        if self.failure is not None:
            raise R4DError(f"r4d: the group is unusable since {self.failure}")
        self.calls += 1
        self._signature = signature
        self._sizes = sizes

    def next_round(self) -> int:
        """Enter the next round; the parity of the slot to use."""
        self._sequence = sequence = (self._sequence + 1) & SEQUENCE_MASK
        if self._signature is not None:
            start = self._headers[sequence & 1][self.rank]
            self._view[start : start + SIGNATURE_BYTES] = self._signature
            if self._sizes:
                packed = struct.pack(f"{len(self._sizes)}q", *self._sizes)
                start += SIGNATURE_BYTES
                self._view[start : start + len(packed)] = packed
            self._agreeing = True
        return sequence & 1

    def sync(self) -> None:
        """Publish this round and wait for every peer; the peers' slots may be read until the next
        round.
        """
        self.publish()
        sequence, flags = self._sequence, self._flags
        for line in self._lines:
            if (flags[line] - sequence) & SEQUENCE_MASK >= _HALF:
                self._wait(line, sequence)
        self._fence()
        if self._agreeing:
            self._compare(sequence & 1)

    def publish(self) -> None:
        """The first half of ``sync``: to be followed by ``await_peer`` for each peer."""
        self._fence()
        self._flags[self.rank * _WORDS_PER_LINE] = self._sequence

    def await_peer(self, peer: int) -> None:
        """Wait for one peer; its slot may be read until the next round. Not in a call's first."""
        assert not self._agreeing
        line = peer * _WORDS_PER_LINE
        if (self._flags[line] - self._sequence) & SEQUENCE_MASK >= _HALF:
            self._wait(line, self._sequence)
        self._fence()

    def barrier(self) -> None:
        """A round without data."""
        self.next_round()
        self.sync()

    def sizes_of(self, rank: int, count: int) -> tuple[int, ...]:
        """The ``sizes`` that ``rank`` opened this call with; valid in the call's first round, after
        ``sync``.
        """
        start = self.layout.header(rank, self._sequence & 1) + SIGNATURE_BYTES
        return struct.unpack(f"{count}q", self._view[start : start + 8 * count])

    def slot(self, rank: int, parity: int, dtype: npt.DTypeLike = np.uint8) -> Array:
        """The whole slot of a rank as a flat array."""
        return self._slots.array(rank, parity, dtype)

    def reserve(self, nbytes: int) -> None:
        """Make slots of ``nbytes`` if memory allows; to be called alike on all ranks, in a call."""
        if nbytes <= self._slots.nbytes or self._largest:
            return
        memory = grown(self, nbytes, self._budget_bytes)
        self._largest = memory is None or nbytes > len(memory) // (2 * self.world_size)
        if memory is not None:
            self._slots.close()
            if self._slots_memory is not None:
                unmap(self._slots_memory)
            self._slots_memory = memory
            self._slots = Slots(memory, 0, len(memory) // (2 * self.world_size))

    def window(self, start: int, nbytes: int) -> memoryview:
        """A stretch of the segment (for the rings of point-to-point messages)."""
        return self._view[start : start + nbytes]

    def fence(self) -> None:
        self._fence()

    def problem(
        self, waiting: Sequence[int], what: str, *, any_of: bool = False
    ) -> R4DError | None:
        """Why ``what`` cannot end: a peer has failed, or one that it waits for has left or died.

        any_of: one of ``waiting`` is enough, so that only the last to leave is a problem.
        """
        if self.failure is not None:
            return R4DError(f"r4d: the group is unusable since {self.failure}")
        status = {peer: self._status(peer) for peer in self.peers}
        for peer in self.peers:
            if status[peer] == _FAILED:
                reason = self._reason(peer)
                return PeerFailed(f"r4d: {what} stopped: rank {peer} failed: {reason}")
        left = [peer for peer in waiting if status[peer] == _LEFT]
        if left and (not any_of or len(left) == len(waiting)):
            return PeerFailed(f"r4d: {what} stopped: rank {left[0]} has destroyed the group")
        for peer in waiting:
            process = self._processes[peer]
            if status[peer] != _LEFT and process is not None and not process.alive():
                return PeerDied(f"r4d: {what} stopped: rank {peer} (pid {process.pid}) died")
        return None

    def fail(self, error: R4DError) -> R4DError:
        """Make the group unusable, tell the peers why, and hand the error back to be raised."""
        if self.failure is None:
            self.failure = str(error)
            self._set_status(_FAILED, str(error).removeprefix("r4d: "))
        return error

    def abort(self, reason: str) -> None:
        """Release peers that wait for this rank; they raise with ``reason``."""
        self.fail(R4DError(reason))

    def set_timeout(self, seconds: float) -> None:
        self.timeout = seconds

    def close(self) -> None:
        """Tell the peers and unmap. Idempotent. Nothing made by ``slot`` or ``window`` may be in
        use.
        """
        if self._closed:
            return
        self._closed = True
        if self.failure is None:
            self._set_status(_LEFT, "")
        self.failure = self.failure or "it was destroyed"
        self._slots.close()
        self._flags.release()
        self._view.release()
        for memory in (self._memory, self._slots_memory):
            if memory is not None:
                unmap(memory)

    def _wait(self, line: int, sequence: int) -> None:
        flags = self._flags
        start = look = time.monotonic()
        while time.monotonic() - start < _SPIN_SECONDS:
            for _ in range(_YIELDS):
                os.sched_yield()
                if (flags[line] - sequence) & SEQUENCE_MASK < _HALF:
                    return
        pause, longest = _PAUSE_SECONDS
        while (flags[line] - sequence) & SEQUENCE_MASK >= _HALF:
            time.sleep(pause)
            pause = min(pause * 1.5, longest)
            now = time.monotonic()
            if now - look < _LOOK_SECONDS and now - start < self.timeout:
                continue
            look = now
            missing = self._missing(sequence)
            error = self.problem(missing, self._name())
            if error is None and now - start >= self.timeout:
                error = CollectiveTimeout(
                    f"r4d: {self._name()} reached its timeout of {self.timeout:g} s on rank "
                    f"{self.rank}: rank(s) {', '.join(map(str, missing))} did not arrive"
                )
            # A peer may have arrived, and failed at what it then saw, since we looked.
            if error is not None and self._missing(sequence):
                raise self.fail(error)

    def _missing(self, sequence: int) -> list[int]:
        flags = self._flags
        return [p for p in self.peers if not reached(flags[p * _WORDS_PER_LINE], sequence)]

    def _compare(self, parity: int) -> None:
        assert self._signature is not None
        mine, view, starts = self._signature, self._view, self._headers[parity]
        for peer in self.peers:
            start = starts[peer]
            if view[start : start + SIGNATURE_BYTES] != mine:
                theirs = bytes(view[start : start + SIGNATURE_BYTES])
                raise self.fail(
                    Disagreement(
                        f"r4d: ranks made different calls (call {self.calls} of the group): "
                        f"rank {self.rank} {_text(mine)}; rank {peer} {_text(theirs)}"
                    )
                )
        self._agreeing = False
        self._text = mine  # type: ignore[assignment]
        self._signature = None

    def _name(self) -> str:
        signature = self._signature or self._text
        text = signature if isinstance(signature, str) else _text(signature)
        return f"{text} (call {self.calls}, sequence {self._sequence})"

    def _status(self, rank: int) -> int:
        start = self.layout.status(rank)
        return int.from_bytes(self._view[start : start + 4], "little")

    def _set_status(self, status: int, reason: str) -> None:
        start = self.layout.status(self.rank)
        data = reason.encode()[: REASON_BYTES - 1] + b"\0"
        self._view[start + LINE_BYTES : start + LINE_BYTES + len(data)] = data
        self._fence()
        self._view[start : start + 4] = status.to_bytes(4, "little")

    def _reason(self, rank: int) -> str:
        start = self.layout.status(rank) + LINE_BYTES
        data = bytes(self._view[start : start + REASON_BYTES])
        return data.partition(b"\0")[0].decode(errors="replace")


def _text(signature: bytes) -> str:
    return signature.rstrip(b"\0").decode(errors="replace")
