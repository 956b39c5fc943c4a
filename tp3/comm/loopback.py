"""Messages of a rank to itself, as ``batch_isend_irecv`` of a ring of one has them.

Sends and receives of one tag meet in the order they were posted. Nothing waits: what nobody has
asked for yet is kept as a copy, and to wait for what was not sent yet is an error at once.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor

from tp3.comm.errors import Disagreement
from tp3.comm.tensors import describe, write
from tp3.comm.untraced import untraced
from tp3.comm.work import DONE, Work


@untraced
class SelfReceive(Work):
    """A receive from the own rank."""

    def __init__(self, tensor: Tensor, tag: int, rank: int) -> None:
        super().__init__([tensor])
        self.tensor = tensor
        self.posted = _mark(tensor)
        self.copied: torch.cuda.Event | None = None
        self._tag, self._rank = tag, rank

    def take(self, data: Tensor) -> None:
        """Copy ``data`` in on the current stream, which has made it."""
        if describe(data) != describe(self.tensor):
            self.finish(
                Disagreement(
                    f"r4d: rank {self._rank} sends {describe(data)} to itself (tag {self._tag}) "
                    f"and receives {describe(self.tensor)}"
                )
            )
            return
        _after(self.posted, data)
        write(self.tensor, data)
        self.copied = _mark(self.tensor)
        self.finish()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Later work on the current stream sees what came. Errors: ValueError if nothing did."""
        if not self.ended:
            raise ValueError(
                f"r4d: rank {self._rank} waits for {describe(self.tensor)} from itself (tag "
                f"{self._tag}) and has not sent it; send first"
            )
        super().wait()
        _after(self.copied, self.tensor)
        return True

    def source_rank(self) -> int:
        self.wait()
        return self._rank

    _source_rank = source_rank


@dataclass
class _Kept:
    data: Tensor
    copied: torch.cuda.Event | None


class Loopback:
    """What one rank has sent itself and not received, and the other way round. Thread-safe."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._lock = threading.Lock()
        self._sent: defaultdict[int, deque[_Kept]] = defaultdict(deque)
        self._wanted: defaultdict[int, deque[SelfReceive]] = defaultdict(deque)

    def send(self, tensor: Tensor, tag: int) -> Work:
        with self._lock:
            if self._wanted[tag]:
                self._wanted[tag].popleft().take(tensor.detach())
            else:
                copy = tensor.detach().clone()
                self._sent[tag].append(_Kept(copy, _mark(copy)))
        return DONE

    def recv(self, tensor: Tensor, tag: int) -> Work:
        work = SelfReceive(tensor.detach(), tag, self._rank)
        with self._lock:
            if self._sent[tag]:
                kept = self._sent[tag].popleft()
                _after(kept.copied, kept.data)
                work.take(kept.data)
            else:
                self._wanted[tag].append(work)
        return work


def _mark(tensor: Tensor) -> torch.cuda.Event | None:
    """What the current stream of the tensor's device has been given so far."""
    return torch.cuda.current_stream(tensor.device).record_event() if tensor.is_cuda else None


def _after(event: torch.cuda.Event | None, tensor: Tensor) -> None:
    if event is not None:
        stream = torch.cuda.current_stream(tensor.device)
        stream.wait_event(event)
        tensor.record_stream(stream)
