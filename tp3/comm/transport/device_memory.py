"""The device memory that ranks of a group share: one's own, exported, and the peers', mapped.

A rank owns two allocations (``layout.DeviceLayout``), flags and data; on AMD GPUs both are
uncached, since peers write into them. Peers map them through handles that travel over the store; a
pair of ranks needs only each other, so the first message between two ranks does not wait for the
others (``pairs``).

None of it waits for what the process has given its GPU to do: that may wait for a peer's message.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

import torch

from tp3.comm.errors import R4DError
from tp3.comm.layout import DeviceLayout
from tp3.comm.transport.bootstrap import Meeting
from tp3.comm.transport.runtime import Runtime, runtime
from tp3.comm.transport.streams import streams_of


@dataclass(frozen=True)
class Offer:
    """What a rank tells its peers: handles of its memory (hex), and which GPU it uses.

    ``error`` is why it has none.
    """

    error: str = ""
    vendor: str = ""
    gpu: str = ""
    multiprocessors: int = 0
    flags: str = ""
    data: str = ""


def offer(meeting: Meeting, what: Offer) -> None:
    """Tell the peers."""
    meeting.store.set(f"device/offer/{meeting.rank}", json.dumps(asdict(what)))


class DeviceMemory:
    """One rank's own allocations and what it has mapped of its peers'. Addresses are ints.

    Errors: R4DError with the reason of whichever side could not.
    """

    def __init__(self, meeting: Meeting, layout: DeviceLayout, device: torch.device) -> None:
        self._meeting = meeting
        self._layout = layout
        self._device = device
        self._runtime: Runtime | None = None
        self._mapped: dict[int, tuple[int, int]] = {}
        self.offers: dict[int, Offer] = {}
        self.flags = 0
        self.data = 0
        self.offers[meeting.rank] = self._allocate()
        offer(meeting, self.offers[meeting.rank])

    @property
    def runtime(self) -> Runtime:
        assert self._runtime is not None
        return self._runtime

    @property
    def mapped(self) -> list[int]:
        """Peers whose memory is mapped."""
        return sorted(self._mapped)

    def refusal(self, peer: int, text: str) -> str:
        """Keep the peer's offer; why the two cannot share memory, "" if they can."""
        record: dict[str, Any] = json.loads(text)
        self.offers[peer] = Offer(**record)
        first, second = sorted((self._meeting.rank, peer))
        for rank in (first, second):
            if self.offers[rank].error:
                return f"rank {rank} cannot share device memory: {self.offers[rank].error}"
        vendors = [self.offers[rank].vendor for rank in (first, second)]
        if vendors[0] != vendors[1]:
            return (
                f"rank {first} uses {vendors[0]} and rank {second} {vendors[1]}; GPUs of two "
                "makers cannot share memory"
            )
        return ""

    def map(self, peer: int) -> None:
        """Map a peer's memory and enter it in the table that kernels read."""
        theirs = self.offers[peer]
        flags = self.runtime.open(bytes.fromhex(theirs.flags))
        data = self.runtime.open(bytes.fromhex(theirs.data))
        self._mapped[peer] = flags, data
        self._enter(peer, flags, data)

    def close(self, *, free: bool) -> None:
        """Unmap the peers' memory; with ``free`` let go of one's own, which nobody may map then."""
        mapped, self._mapped = self._mapped, {}
        for addresses in mapped.values():
            for address in addresses:
                self.runtime.close(address)
        if free:
            for address in (self.flags, self.data):
                if address:
                    self.runtime.free(address)
            self.flags = self.data = 0

    def _allocate(self) -> Offer:
        layout = self._layout
        try:
            properties = torch.cuda.get_device_properties(self._device)
            made = self._runtime = runtime()
            self.flags = made.malloc(layout.flag_bytes, uncached=True)
            self.data = made.malloc(layout.data_bytes, uncached=True)
            with streams_of(self._device).borrowed() as stream:
                for address, nbytes, byte in (
                    (self.flags, layout.flag_bytes, 0),
                    (self.data, layout.data_bytes, 0),
                    (self.data + layout.sentinels, layout.rings - layout.sentinels, 0xFF),
                ):
                    made.fill(address, byte, nbytes, stream.cuda_stream)
            self._enter(self._meeting.rank, self.flags, self.data)
            return Offer(
                vendor="HIP" if torch.version.hip else "CUDA",
                gpu=str(getattr(properties, "uuid", self._device.index)),
                multiprocessors=properties.multi_processor_count,
                flags=made.export(self.flags).hex(),
                data=made.export(self.data).hex(),
            )
        except (R4DError, RuntimeError) as error:
            return Offer(error=str(error).removeprefix("r4d: "))

    def _enter(self, rank: int, flags: int, data: int) -> None:
        table, world_size = self.flags + self._layout.TABLE, self._layout.world_size
        with streams_of(self._device).borrowed() as stream:
            for place, address in ((rank, flags), (world_size + rank, data)):
                entry = address.to_bytes(8, "little")
                self.runtime.write(table + 8 * place, entry, stream.cuda_stream)
