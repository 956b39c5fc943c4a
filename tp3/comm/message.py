"""One point-to-point message in flight, as a ``Work``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol

from torch import Tensor

from tp3.comm.tensors import Array
from tp3.comm.untraced import untraced
from tp3.comm.work import Work

ANY_SOURCE = -1


class Carrier(Protocol):
    """What moves messages: ``p2p.Channels`` or ``span_channels.SpanChannels``."""

    timeout: float

    def progress(self) -> bool: ...

    def drive(self, message: Message, timeout: float) -> None: ...


@untraced
class Message(Work):
    """A send or a receive.

    ``data`` are its bytes, flat; ``text`` its dtype and shape; ``scatter`` is called once a
    receive's bytes are there, to bring them into a tensor that is not contiguous. ``moved`` counts
    bytes, -1 before the frame.
    """

    def __init__(
        self,
        kind: str,
        peer: int,
        tag: int,
        data: Array,
        text: str,
        *,
        result: Sequence[Tensor] = (),
        scatter: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(result)
        self.kind = kind
        self.peer = peer
        self.tag = tag
        self.data = data
        self.text = text
        self.scatter = scatter
        self.moved = -1
        self.channels: Carrier

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if not self.ended:
            self.channels.drive(self, timeout.total_seconds() or self.channels.timeout)
        return super().wait()

    def is_completed(self) -> bool:
        if not self.ended:
            self.channels.progress()
        return self.ended

    def source_rank(self) -> int:
        if self.kind != "recv":
            return super().source_rank()
        self.wait()
        return self.peer

    _source_rank = source_rank

    def describe(self) -> str:
        way = "to" if self.kind == "send" else "from"
        peer = "any rank" if self.peer == ANY_SOURCE else f"rank {self.peer}"
        return f"{self.kind} of {self.text} {way} {peer} (tag {self.tag})"
