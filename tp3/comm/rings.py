"""The byte rings of point-to-point messages: one per ordered pair of ranks, in the shared segment.

A message is a frame (tag, bytes, dtype and shape as text) and its payload, both in multiples of
``FRAME_BYTES``, so a frame never wraps. The sender alone moves the ring's ``written`` counter, the
receiver alone ``read``; both only rise (64 bits), each after a fence behind the bytes it speaks of.
A receiver that meets a message nobody asked for yet (another tag) keeps it on its heap, and looks
at a ring only while somebody receives from it: a sender that runs ahead is held back by the ring.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from tp3.comm.errors import Disagreement, R4DError
from tp3.comm.layout import FRAME_BYTES, LINE_BYTES, round_up
from tp3.comm.message import ANY_SOURCE, Message
from tp3.comm.tensors import Array
from tp3.comm.transport.host import HostTransport

_FRAME = struct.Struct("=qq")
_READ = LINE_BYTES // 8


@dataclass
class _Incoming:
    """A message on its way out of a ring."""

    tag: int
    nbytes: int
    text: str
    data: Array = field(init=False)
    moved: int = 0
    receive: Message | None = None


@dataclass
class _Ring:
    """One direction between two ranks, as one of them sees it."""

    counters: memoryview
    data: Array
    frames: memoryview
    sends: deque[Message] = field(default_factory=deque)
    arrived: deque[_Incoming] = field(default_factory=deque)
    current: _Incoming | None = None

    @property
    def written(self) -> int:
        return self.counters[0]

    @property
    def read(self) -> int:
        return self.counters[_READ]


class Rings:
    """The rings of one rank. Not thread-safe; ``ended`` collects messages, with their error."""

    def __init__(self, transport: HostTransport) -> None:
        rank, layout = transport.rank, transport.layout
        self.ended: deque[tuple[Message, R4DError | None]] = deque()
        self._transport = transport
        self._capacity = layout.ring_bytes
        self._receives: list[Message] = []
        self._out = {peer: self._ring(rank, peer) for peer in transport.peers}
        self._in = {peer: self._ring(peer, rank) for peer in transport.peers}

    def _ring(self, sender: int, receiver: int) -> _Ring:
        layout = self._transport.layout
        counters = self._transport.window(layout.ring_counters(sender, receiver), 2 * LINE_BYTES)
        frames = self._transport.window(layout.ring(sender, receiver), layout.ring_bytes)
        return _Ring(counters.cast("Q"), np.frombuffer(frames, np.uint8), frames)

    def add(self, message: Message) -> None:
        """Queue a message."""
        if message.kind == "send":
            self._out[message.peer].sends.append(message)
        elif not self._take_arrived(message):
            self._receives.append(message)

    def progress(self) -> bool:
        """Move on whatever can be moved; whether anything did."""
        moved = False
        for ring in self._out.values():
            while ring.sends and self._push(ring):
                moved = True
        for peer, ring in self._in.items():
            while self._wanted(peer, ring) and self._pull(peer, ring):
                moved = True
        return moved

    def pending(self) -> Iterator[Message]:
        """Messages that have not ended."""
        yield from self._receives
        for ring in self._out.values():
            yield from ring.sends
        for ring in self._in.values():
            if ring.current is not None and ring.current.receive is not None:
                yield ring.current.receive

    def cancel(self, message: Message) -> None:
        """Forget a receive; what comes for it later stays on the heap."""
        if message in self._receives:
            self._receives.remove(message)

    def end_all(self, error: R4DError) -> None:
        """End all pending messages with ``error``."""
        self.ended.extend((message, error) for message in self.pending())
        self._receives.clear()
        for ring in self._out.values():
            ring.sends.clear()
        for ring in self._in.values():
            ring.current = None

    def release(self) -> None:
        """Let go of the segment."""
        rings = [*self._out.values(), *self._in.values()]
        self._out.clear()
        self._in.clear()
        for ring in rings:
            ring.counters.release()
            del ring.data  # an array keeps its buffer from being released
            ring.frames.release()

    def _wanted(self, peer: int, ring: _Ring) -> bool:
        if ring.current is not None and ring.current.receive is not None:
            return True
        return any(message.peer in (peer, ANY_SOURCE) for message in self._receives)

    def _push(self, ring: _Ring) -> bool:
        """Write the next stretch of the first pending send; False when the ring is full."""
        message, written, capacity = ring.sends[0], ring.written, self._capacity
        free = capacity - (written - ring.read)
        if not free:
            return False
        place = written % capacity
        if message.moved < 0:
            frame = _FRAME.pack(message.tag, message.data.size) + message.text.encode()
            ring.frames[place : place + FRAME_BYTES] = frame[:FRAME_BYTES].ljust(FRAME_BYTES, b"\0")
            message.moved, count = 0, FRAME_BYTES
        else:
            start = message.moved
            count = min(message.data.size - start, free, capacity - place)
            ring.data[place : place + count] = message.data[start : start + count]
            message.moved += count
        self._transport.fence()
        ring.counters[0] = written + round_up(count, FRAME_BYTES)
        if message.moved == message.data.size:
            self.ended.append((ring.sends.popleft(), None))
        return True

    def _pull(self, peer: int, ring: _Ring) -> bool:
        """Read the next stretch of what ``peer`` sends; False when the ring is empty."""
        read, capacity = ring.read, self._capacity
        available = ring.written - read
        if not available:
            return False
        self._transport.fence()
        place = read % capacity
        incoming = ring.current
        if incoming is None:
            tag, nbytes = _FRAME.unpack_from(ring.frames, place)
            text = bytes(ring.frames[place + _FRAME.size : place + FRAME_BYTES])
            incoming = _Incoming(tag, nbytes, text.rstrip(b"\0").decode(errors="replace"))
            receive = self._match(peer, tag)
            if receive is not None:
                if not self._bind(peer, incoming, receive):
                    return False
                incoming.data = receive.data
            else:
                incoming.data = np.empty(nbytes, np.uint8)
            ring.current, count = incoming, FRAME_BYTES
        else:
            start = incoming.moved
            count = min(incoming.nbytes - start, available, capacity - place)
            incoming.data[start : start + count] = ring.data[place : place + count]
            incoming.moved += count
        self._transport.fence()
        ring.counters[_READ] = read + round_up(count, FRAME_BYTES)
        if incoming.moved == incoming.nbytes:
            ring.current = None
            if incoming.receive is None:
                ring.arrived.append(incoming)
            else:
                self._deliver(incoming, incoming.receive)
        return True

    def _match(self, peer: int, tag: int) -> Message | None:
        for index, message in enumerate(self._receives):
            if message.tag == tag and message.peer in (peer, ANY_SOURCE):
                return self._receives.pop(index)
        return None

    def _bind(self, peer: int, incoming: _Incoming, receive: Message) -> bool:
        """Give ``incoming`` to ``receive``; False, and the group failed, when they differ."""
        dtypes = [text.partition("[")[0] for text in (incoming.text, receive.text)]
        if incoming.nbytes == receive.data.size and dtypes[0] == dtypes[1]:
            receive.peer = peer
            incoming.receive = receive
            return True
        error = self._transport.fail(
            Disagreement(
                f"r4d: rank {self._transport.rank} receives {receive.text} from rank {peer} "
                f"(tag {receive.tag}), which sent {incoming.text}"
            )
        )
        self.ended.append((receive, error))
        self.end_all(error)
        return False

    def _take_arrived(self, receive: Message) -> bool:
        """Give a new receive a message that is on the heap already, or on its way there."""
        sources = self._in if receive.peer == ANY_SOURCE else (receive.peer,)
        for peer in sources:
            ring = self._in[peer]
            for index, incoming in enumerate(ring.arrived):
                if incoming.tag == receive.tag:
                    del ring.arrived[index]
                    if self._bind(peer, incoming, receive):
                        self._deliver(incoming, receive)
                    return True
            current = ring.current
            if current is not None and current.receive is None and current.tag == receive.tag:
                self._bind(peer, current, receive)
                return True
        return False

    def _deliver(self, incoming: _Incoming, receive: Message) -> None:
        if incoming.data is not receive.data:
            receive.data[:] = incoming.data
        if receive.scatter is not None:
            receive.scatter()
        self.ended.append((receive, None))
