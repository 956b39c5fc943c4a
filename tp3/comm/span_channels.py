"""Point-to-point messages of a group over several hosts: Gloo's, under the interface of
``p2p.Channels``.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from tp3.comm.errors import R4DError
from tp3.comm.message import ANY_SOURCE, Message
from tp3.comm.transport.span import SpanTransport


class SpanChannels:
    """All point-to-point traffic of one rank; a ``Message`` ends when it is waited for."""

    def __init__(self, span: SpanTransport) -> None:
        self._span = span
        self._works: dict[Message, Any] = {}
        self.timeout = span.timeout

    def post(self, message: Message) -> Message:
        gloo, data = self._span.everyone, torch.from_numpy(message.data)
        message.channels = self
        if message.kind == "send":
            work = gloo.send([data], message.peer, message.tag)
        elif message.peer == ANY_SOURCE:
            work = gloo.recv_anysource([data], message.tag)
        else:
            work = gloo.recv([data], message.peer, message.tag)
        self._works[message] = work
        return message

    def progress(self) -> bool:
        """Gloo moves its messages by itself; one ends when it is waited for."""
        return False

    def drive(self, message: Message, timeout: float) -> None:
        work = self._works.pop(message, None)
        if work is None:
            return  # another thread waits for it already
        try:
            work.wait(timedelta(seconds=timeout))
        except RuntimeError as error:
            text = (
                f"r4d: {message.describe()} failed between hosts on rank {self._span.rank}: {error}"
            )
            message.finish(self._span.fail(R4DError(text)))
            return
        if message.peer == ANY_SOURCE:
            message.peer = work._source_rank()
        if message.scatter is not None:
            message.scatter()
        message.finish()

    def fail(self, error: R4DError) -> None:
        """End all pending messages with ``error``."""
        while self._works:
            self._works.popitem()[0].finish(error)

    def monitored_barrier(self, seconds: float, *, wait_all_ranks: bool) -> None:
        self._span.everyone.monitored_barrier(
            timedelta(seconds=seconds), wait_all_ranks=wait_all_ranks
        )

    def close(self) -> None:
        self.fail(R4DError("r4d: the group was destroyed while a message was pending"))
