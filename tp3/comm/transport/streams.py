"""Streams of r4d's own.

torch hands out 32 streams in turn, so one of them may be anybody's as well: a message that waits on
it would hold up the very work that its peer waits for. These are shared with nobody; given back,
they serve the next who asks, so that memory which torch keeps for a stream does not pile up.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from tp3.comm.transport.runtime import runtime


class Streams:
    """Those of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._idle: list[torch.cuda.Stream] = []

    def take(self) -> torch.cuda.Stream:
        """A stream that waits for no other, the default stream included."""
        try:
            return self._idle.pop()
        except IndexError:
            with torch.cuda.device(self._device):
                stream: torch.cuda.Stream = torch.cuda.ExternalStream(
                    runtime().new_stream(), self._device
                )
            return stream

    def give_back(self, streams: Iterable[torch.cuda.Stream]) -> None:
        """What runs on them has ended."""
        self._idle.extend(streams)

    @contextmanager
    def borrowed(self) -> Iterator[torch.cuda.Stream]:
        """As the current stream; the host waits for it at the end."""
        stream = self.take()
        with torch.cuda.stream(stream):
            yield stream
        stream.synchronize()
        self.give_back([stream])


@functools.cache
def streams_of(device: torch.device) -> Streams:
    """``device`` has an index."""
    return Streams(device)
