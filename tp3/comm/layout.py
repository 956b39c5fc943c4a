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

* Device memory (``DeviceLayout``): a sender pushes, so each rank owns W-1 receive regions and
  sender i writes region ``i - (i > j)`` of receiver j. There a launch may make several rounds; why
  slots also survive launches of different grids is argued in ``kernels.rounds``.
* Host memory (``HostLayout``): one written copy serves every reader, so each rank owns one region
  that it alone writes. Beside the slots lie headers (who calls what), status pages and the rings
  of point-to-point messages.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import lru_cache

SEQUENCE_MASK = 0xFFFF_FFFF
MAX_DEVICE_RANKS = 16
MAX_BLOCKS = 256
_HALF = 0x8000_0000
LINE_BYTES = 64 if sys.platform != "darwin" else 128
PAGE_BYTES = 4096
SIGNATURE_BYTES = 256
REASON_BYTES = 1024
FRAME_BYTES = 256
_FIRST_SLOT_BYTES = 64 << 10
_DEVICE_SLOTS_BYTES = 32 << 20  # of a rank, for each of the two kinds
_LARGEST_SLOT_BYTES = 8 << 20
_LARGEST_SENTINEL_BYTES = 16 << 20
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


def _share(world_size: int, largest: int) -> int:
    """A power of two of which 2 (W-1) fit into what a rank gives."""
    share = _DEVICE_SLOTS_BYTES // (2 * (world_size - 1))
    return min(1 << (share.bit_length() - 1), largest)


def sentinel_bytes(world_size: int) -> int:
    """The longest message of the sentinel kernel."""
    return _share(world_size, _LARGEST_SENTINEL_BYTES)


@dataclass(frozen=True)
class DeviceLayout:
    """Byte offsets in the two allocations that each rank owns on its device: flags and data.

    Every offset is the same on all ranks. "mine" is written and read by the owner alone, "from i"
    is written by rank i and read by the owner. Words are 32 bits.

    ``slot_bytes``: what one sender can push to a receiver in one round. ``sentinel_bytes``: the
    longest message of the sentinel kernel. A channel is a ring of ``RING_CHUNKS`` chunks between
    two ranks; there are ``channels`` of them in each direction for collectives, and as many again
    for messages.
    """

    world_size: int
    slot_bytes: int = 0
    sentinel_bytes: int = 0
    channels: int = 16

    CHUNK_BYTES = 64 << 10
    RING_CHUNKS = 2
    SETS = 2  # of channels: collectives, messages
    TABLE = 0  # mine: address of each rank's flags, then of each rank's data, int64
    STICKY = 256  # mine: not 0 once a wait has failed; then nothing is pushed or believed
    TRIAL = 384  # mine: the same for self-tests of pairs, which fail without failing the group
    LAUNCHES = 512  # mine: the sequence number, a copy for each block
    SENTINELS = LAUNCHES + 4 * MAX_BLOCKS  # mine: the same for the sentinel kernel's own slots
    FLAGS = SENTINELS + 4 * MAX_BLOCKS  # from i: a sequence number for each block

    def __post_init__(self) -> None:
        if not 2 <= self.world_size <= MAX_DEVICE_RANKS:
            raise ValueError(
                f"device groups have 2..{MAX_DEVICE_RANKS} ranks, not {self.world_size}"
            )
        if not self.slot_bytes:
            object.__setattr__(self, "slot_bytes", _share(self.world_size, _LARGEST_SLOT_BYTES))
        if not self.sentinel_bytes:
            object.__setattr__(self, "sentinel_bytes", sentinel_bytes(self.world_size))

    @property
    def channel_words(self) -> int:
        """Byte offset of the channels' words: arrays of [SETS, W, channels].

        mine: sent, received. from i: arrived, acknowledged, and for each chunk of the ring a header
        (two int64: bytes, tag).
        """
        return self.FLAGS + 4 * MAX_BLOCKS * self.world_size

    @property
    def flag_bytes(self) -> int:
        words = self.SETS * self.world_size * self.channels
        return self.channel_words + 4 * 4 * words + 16 * self.RING_CHUNKS * words

    @property
    def sentinels(self) -> int:
        """Byte offset in the data: [W-1, 2] slots that hold all ones wherever nothing has come."""
        return (self.world_size - 1) * 2 * self.slot_bytes

    @property
    def rings(self) -> int:
        """Byte offset in the data: [SETS, W-1, channels, RING_CHUNKS] chunks."""
        return self.sentinels + (self.world_size - 1) * 2 * self.sentinel_bytes

    @property
    def data_bytes(self) -> int:
        chunks = self.SETS * (self.world_size - 1) * self.channels * self.RING_CHUNKS
        return self.rings + chunks * self.CHUNK_BYTES
