"""The device half of a group: connected at its first device call, closed with the group.

Ranks that cannot share device memory go through the host instead, all of them, and say why once in
the log: a group works wherever its processes run.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tp3.comm.collectives import device as moves
from tp3.comm.device_queue import DeviceQueue, current
from tp3.comm.errors import R4DError
from tp3.comm.layout import MAX_DEVICE_RANKS
from tp3.comm.reduce import Reduction
from tp3.comm.rows import Chosen
from tp3.comm.tensors import copy_back
from tp3.comm.transport.bootstrap import Meeting
from tp3.comm.transport.device import DeviceTransport
from tp3.comm.transport.device_kernels import Plan, load_exchange
from tp3.comm.transport.device_memory import Offer, offer
from tp3.comm.transport.host import HostTransport
from tp3.comm.transport.probe import PatternProbe
from tp3.comm.transport.span import SpanTransport
from tp3.comm.work import Work

logger = logging.getLogger(__name__)
_CLOSING_SECONDS = 45.0  # longer than the haste of a peer's messages
_POLL_SECONDS = 2e-3
_MOST_KNOWN = 1024


class DeviceSide:
    """One rank's part of a group on one device.

    ``problem``: why collectives do not run on the device; None while they do, or before they tried.
    Messages ask for no more than their own two ranks.
    """

    def __init__(
        self, meeting: Meeting, host: HostTransport | SpanTransport, device: torch.device
    ) -> None:
        self.device = device
        self.kind = "hip" if torch.version.hip else "cuda"
        self.problem = _refusal(host)
        self.transport: DeviceTransport | None = None
        self.queue = DeviceQueue(device, self.check)
        self.known: dict[tuple[torch.dtype, int, str], tuple[Plan, str]] = {}
        self._meeting = replace(meeting, check=self.check)
        self._host = host
        self._connected = False
        self._no_pairs = self.problem is not None
        self._unmade: R4DError | None = None  # why there is no transport and will be none
        self._apart: set[int] = set()  # peers that share no memory with this rank
        self._loaded = False  # what messages need
        self._connecting = threading.Lock()

    def check(self) -> None:
        """Raise what has gone wrong. Errors: R4DError."""
        if self.transport is not None:
            self.transport.check()

    def _check_all(self) -> None:
        """The same, and that no peer is gone, connected or not."""
        self.check()
        assert isinstance(self._host, HostTransport)
        problem = self._host.problem(self._host.peers, "connecting")
        if problem is not None:
            raise self._host.fail(problem)

    def reachable(self) -> bool:
        """Whether all ranks share device memory; the first call, which all make, finds out."""
        if self._connected or self.problem is not None:
            return self.problem is None
        with self._connecting, current(self.device):
            if not self._connected and self.problem is None:
                _refuse_capture()
                try:
                    meeting = replace(self._meeting, check=self._check_all)
                    meeting.vote("device/ready", self._connect_all)
                    self._connected = True
                except R4DError as error:
                    self._raise_if_failed(error)
                    self.problem = self._through_host("tensors", error)
        return self.problem is None

    def remember(self, chosen: Chosen, tensor: Tensor, reduction: Reduction) -> None:
        """Keep what the row has settled for all-reduces like this one (``Group.repeat``)."""
        if len(self.known) >= _MOST_KNOWN:
            self.known.clear()
        assert self.transport is not None
        algorithm = chosen.row.name.removeprefix("gpu-")
        plan = moves.repeatable(self.transport, algorithm, tensor, reduction)
        if plan is not None:
            self.known[tensor.dtype, tensor.numel(), reduction.op] = plan, chosen.label

    def send(self, data: Tensor, receiver: int, tag: int) -> Work | None:
        """Send on the stream of that peer and direction; None: they share no memory."""
        transport = self._beside(receiver)
        if transport is None:
            return None
        lane = "send", receiver
        return self._message(lambda: moves.send(transport, data, receiver, tag), (), lane)

    def recv(self, tensor: Tensor, data: Tensor, sender: int, tag: int) -> Work | None:
        """Receive ``data``, flat, and bring it into ``tensor``; None: they share no memory."""
        transport = self._beside(sender)
        if transport is None:
            return None

        def call() -> None:
            moves.recv(transport, data, sender, tag)
            copy_back(tensor, data)

        return self._message(call, [tensor], ("recv", sender))

    def _message(self, call: Callable[[], None], result: Sequence[Tensor], lane: Any) -> Work:
        def guarded() -> None:
            """The peer must not wait for a message that could not be started."""
            try:
                call()
            except BaseException as error:
                self._host.fail(R4DError(f"r4d: {type(error).__name__}: {error}"))
                raise

        return self.queue.message(guarded, result, lane)

    def _beside(self, peer: int) -> DeviceTransport | None:
        if self._no_pairs or peer in self._apart:
            return None
        with self._connecting, current(self.device):
            transport = self.transport
            if transport is None or peer not in transport.connected:
                _refuse_capture()
                try:
                    self._connect([peer])
                except R4DError as error:
                    self._raise_if_failed(error)
                    self._apart.add(peer)
                    self._through_host(f"messages with rank {peer}", error)
                    return None
            assert self.transport is not None
            if not self._loaded:
                load_exchange(self.transport)
                self._loaded = True
        return self.transport

    def abort(self, reason: R4DError) -> None:
        """End kernels that wait."""
        if self.transport is not None:
            self.transport.abort(reason)

    def close(self, timeout: float) -> None:
        """Let kernels end, meet the peers, unmap, meet them again, free.

        What a peer may still use is not freed: a peer that does not come within the timeout, or a
        group that has failed, leaves this rank's memory allocated until the process ends.
        """
        transport, self.transport = self.transport, None
        if transport is None:
            self.queue.give_back()
            return
        failed = self._host.failure is not None
        if failed:
            transport.abort(R4DError(str(self._host.failure)))
        transport.hurry()
        self.queue.drain()
        if transport.unsent() and not failed:
            told = "r4d: a message was pending when its group was destroyed: %s"
            logger.error(told, transport.unsent())
        peers = transport.mapped
        met = not failed and self._meet("drained", peers, timeout)
        with current(self.device):
            transport.close(free=False)
            if met and self._meet("unmapped", peers, timeout):
                transport.close(free=True)

    def leave(self) -> None:
        """The process ends: tell the peers not to wait; its memory goes with it."""
        if self.transport is not None:
            self.transport.stop()
            for stage in ("drained", "unmapped"):
                with suppress(RuntimeError):  # the store went first
                    self._meeting.store.set(f"device/{stage}/{self._meeting.rank}", "")

    def _raise_if_failed(self, error: R4DError) -> None:
        """A group that has failed has no other way either."""
        if self._host.failure is not None:
            raise error

    def _through_host(self, what: str, error: R4DError) -> str:
        """Say once in the log what does not stay on the device; the reason."""
        reason = str(error).removeprefix("r4d: ")
        logger.warning(
            "r4d: %s on %s travel through host memory, which is slow and cannot be captured in "
            "graphs: %s",
            what,
            self.device,
            reason,
        )
        return reason

    def _connect_all(self) -> None:
        peers = [rank for rank in range(self._meeting.world_size) if rank != self._meeting.rank]
        self._connect(peers)
        assert self.transport is not None
        self.transport.agree_on_blocks()

    def _connect(self, ranks: Sequence[int]) -> None:
        if self.transport is None:
            if self._unmade is not None:
                raise self._unmade
            assert isinstance(self._host, HostTransport)
            try:
                self.transport = DeviceTransport(self._meeting, self._host, self.device)
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                self._unmade = R4DError(f"r4d: {reason}")  # for ever: peers read an offer once
                offer(self._meeting, Offer(error=reason))  # or they would wait for it
                raise self._unmade from error
        transport = self.transport
        transport.connect(ranks, lambda peer: PatternProbe(transport, peer))

    def _meet(self, stage: str, peers: Sequence[int], timeout: float) -> bool:
        """Whether ``peers`` came to this stage of closing within the timeout."""
        store, missing = self._meeting.store, list(peers)
        deadline = time.monotonic() + min(timeout, _CLOSING_SECONDS)
        try:
            store.set(f"device/{stage}/{self._meeting.rank}", "")
            while True:
                missing = [r for r in missing if not store.check([f"device/{stage}/{r}"])]
                if not missing:
                    return True
                if time.monotonic() > deadline or self._lost(missing):
                    return False
                time.sleep(_POLL_SECONDS)
        except RuntimeError:  # the store went first
            return False

    def _lost(self, peers: Sequence[int]) -> bool:
        assert isinstance(self._host, HostTransport)
        return self._host.problem(peers, "closing") is not None


def _refuse_capture() -> None:
    if torch.cuda.is_current_stream_capturing():
        raise ValueError(
            "r4d: the first call of a group on a device connects its ranks and cannot be captured "
            "in a graph; make one call before"
        )


def _refusal(host: HostTransport | SpanTransport) -> str | None:
    if host.hosts > 1:
        return "the group spans several hosts"
    if not 2 <= host.world_size <= MAX_DEVICE_RANKS:
        return f"kernels serve 2..{MAX_DEVICE_RANKS} ranks and the group has {host.world_size}"
    return None
