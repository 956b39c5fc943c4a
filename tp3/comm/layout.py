"""Where bytes lie in the memory that ranks share, and when a slot may be written again.

Symbols: W world size, r group rank, s sequence number of a round (32 bits, it wraps).

A *round* is one launch: every rank writes its slot ``s & 1``, publishes ``s`` in its flag, waits
until every peer's flag has reached ``s``, then reads the peers' slots. The sequence is one counter
per group, advanced identically on every rank by every round.

Why two slots suffice. Rank i writes slot ``s & 1`` in round s; its last use was round s-2. A peer
publishes s-1 only after it has finished reading round s-2 (program order), and rank i left round
s-1 only after it had seen every peer's s-1. So when rank i starts round s, nobody reads slot
``s & 1`` any more. A fast rank is at most one round ahead of the slowest: flags are compared by
``>=``, never by ``==``.

Two places use this:

* Device memory: a sender pushes, so each rank owns W-1 receive regions and sender i writes region
  ``i - (i > j)`` of receiver j.
* Host memory (``HostLayout``): one written copy serves every reader, so each rank owns one region
  that it alone writes. Beside the slots lie headers (who calls what), status pages and the rings
  of point-to-point messages.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import lru_cache

SEQUENCE_MASK = 0xFFFF_FFFF
_HALF = 0x8000_0000
LINE_BYTES = 64 if sys.platform != "darwin" else 128
PAGE_BYTES = 4096
SIGNATURE_BYTES = 256
REASON_BYTES = 1024
FRAME_BYTES = 256
_FIRST_SLOT_BYTES = 64 << 10
_RINGS_BYTES = 512 << 10


def reached(seen: int, sequence: int) -> bool:
    """Whether a flag that reads ``seen`` has reached ``sequence``; right across the 32-bit wrap."""
    return (seen - sequence) & SEQUENCE_MASK < _HALF


def peers(rank: int, world_size: int) -> tuple[int, ...]:
    """All other group ranks, ascending: the canonical order never depends on devices."""
    return tuple(r for r in range(world_size) if r != rank)


def region_index(sender: int, receiver: int) -> int:
    """The index of the region of ``receiver`` that ``sender`` writes."""
    assert sender != receiver
    return sender - (sender > receiver)


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@lru_cache(maxsize=1024)
def split(numel: int, world_size: int, *, align: int = 16) -> list[int]:
    """How many of ``numel`` elements each rank owns, one after another; the last parts may be short
    or empty.
    """
    part = round_up(-(-numel // world_size), align)
    return [max(min(part, numel - rank * part), 0) for rank in range(world_size)]


@dataclass(frozen=True)
class HostLayout:
    """Byte offsets in the one segment that the ranks of a group on one host share.

    ``slot_bytes`` is what one rank can hand to its peers in one round before larger slots are made
    (``transport.slots``); ``ring_bytes`` what a point-to-point channel holds before its sender has
    to wait.
    """

    world_size: int
    slot_bytes: int
    ring_bytes: int

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ValueError(f"world_size is {self.world_size}; it must be at least 1")
        for name in ("slot_bytes", "ring_bytes"):
            value = getattr(self, name)
            if value < PAGE_BYTES or value % PAGE_BYTES:
                raise ValueError(
                    f"{name} is {value}; it must be a positive multiple of {PAGE_BYTES}"
                )

    @classmethod
    def small(cls, world_size: int) -> HostLayout:
        """What a group starts with: 64 KiB slots, and rings that share half a MiB."""
        channels = max(world_size * (world_size - 1), 1)
        ring = min(_FIRST_SLOT_BYTES, _RINGS_BYTES // channels // PAGE_BYTES * PAGE_BYTES)
        return cls(world_size, _FIRST_SLOT_BYTES, ring or PAGE_BYTES)

    @property
    def header_bytes(self) -> int:
        """Signature of the call and the 2·W sizes that may differ between ranks (int64)."""
        return round_up(SIGNATURE_BYTES + 16 * self.world_size, LINE_BYTES)

    def flag(self, rank: int) -> int:
        return rank * LINE_BYTES

    def status(self, rank: int) -> int:
        """A status word, then the reason as UTF-8 text."""
        return self._status_base + rank * (LINE_BYTES + REASON_BYTES)

    def header(self, rank: int, slot: int) -> int:
        return self._header_base + (rank * 2 + slot) * self.header_bytes

    def ring_counters(self, sender: int, receiver: int) -> int:
        """Bytes written (sender's line), then bytes read (receiver's line), as int64."""
        return self._counter_base + self._channel(sender, receiver) * 2 * LINE_BYTES

    def ring(self, sender: int, receiver: int) -> int:
        return self._ring_base + self._channel(sender, receiver) * self.ring_bytes

    def slot(self, rank: int, slot: int) -> int:
        return self._slot_base + (rank * 2 + slot) * self.slot_bytes

    @property
    def total_bytes(self) -> int:
        return self._slot_base + self.world_size * 2 * self.slot_bytes

    @property
    def _channels(self) -> int:
        return self.world_size * (self.world_size - 1)

    def _channel(self, sender: int, receiver: int) -> int:
        return receiver * (self.world_size - 1) + region_index(sender, receiver)

    @property
    def _status_base(self) -> int:
        return self.world_size * LINE_BYTES

    @property
    def _header_base(self) -> int:
        return self._status_base + self.world_size * (LINE_BYTES + REASON_BYTES)

    @property
    def _counter_base(self) -> int:
        return self._header_base + self.world_size * 2 * self.header_bytes

    @property
    def _ring_base(self) -> int:
        return round_up(self._counter_base + self._channels * 2 * LINE_BYTES, PAGE_BYTES)

    @property
    def _slot_base(self) -> int:
        return self._ring_base + self._channels * self.ring_bytes
