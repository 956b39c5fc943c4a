"""The device memory that ranks of a group share: one's own, exported, and the peers', mapped.

A rank owns two allocations (``layout.DeviceLayout``), flags and data; on AMD GPUs both are
uncached, since peers write into them. Peers map them through handles that travel over the store; a
pair of ranks needs only each other, so the first message between two ranks does not wait for the
others.

Every step is answered before the next one: a pair goes on only when both have mapped the other and
both have found the pattern that the other sent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from tp3.comm.errors import R4DError
from tp3.comm.layout import DeviceLayout
from tp3.comm.transport.bootstrap import Meeting
from tp3.comm.transport.runtime import Runtime, runtime


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
        offer = self._allocate()
        self.offers[meeting.rank] = offer
        meeting.store.set(f"device/offer/{meeting.rank}", json.dumps(asdict(offer)))

    @property
    def runtime(self) -> Runtime:
        assert self._runtime is not None
        return self._runtime

    @property
    def connected(self) -> frozenset[int]:
        """Peers whose memory is mapped."""
        return frozenset(self._mapped)

    def read_offers(self, ranks: Iterable[int]) -> None:
        """Learn what ``ranks`` offer; R4DError names the first that has nothing to share."""
        for rank in ranks:
            if rank not in self.offers:
                record: dict[str, Any] = json.loads(self._meeting.read("device/offer", rank))
                self.offers[rank] = Offer(**record)
        own = self.offers[self._meeting.rank]
        for rank in sorted({*ranks, self._meeting.rank}):
            offer = self.offers[rank]
            if offer.error:
                raise R4DError(f"r4d: rank {rank} cannot share device memory: {offer.error}")
            if offer.vendor != own.vendor:
                raise R4DError(
                    f"r4d: rank {rank} uses {offer.vendor} and rank {self._meeting.rank} "
                    f"{own.vendor}; GPUs of two makers cannot share memory"
                )

    def connect(self, rank: int) -> str:
        """Map a peer's memory and enter it in the table that kernels read; "": nothing is wrong."""
        offer, table = self.offers[rank], self._layout.TABLE
        flags = self.runtime.open(bytes.fromhex(offer.flags))
        data = self.runtime.open(bytes.fromhex(offer.data))
        self._mapped[rank] = flags, data
        self._enter(table, rank, flags, data)
        return ""

    def answer(self, stage: str, ranks: Iterable[int], step: Callable[[int], str]) -> None:
        """``step(rank)`` says what is wrong with a pair ("": nothing); both ends hear both answers.

        R4DError on both, with the reason.
        """
        ranks = list(ranks)
        me, wrong = self._meeting.rank, ""
        for rank in ranks:
            try:
                reason = step(rank)
            except R4DError as error:
                reason = str(error).removeprefix("r4d: ")
            self._meeting.store.set(f"device/{stage}/{me}/{rank}", reason)
            wrong = wrong or (reason and f"rank {me}: {reason}")
        for rank in ranks:
            reason = self._meeting.read(f"device/{stage}/{rank}", me).decode()
            wrong = wrong or (reason and f"rank {rank}: {reason}")
        if wrong:
            raise R4DError(f"r4d: {wrong}")

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
            made.fill(self.data + layout.sentinels, 0xFF, layout.rings - layout.sentinels)
            self._enter(layout.TABLE, self._meeting.rank, self.flags, self.data)
            return Offer(
                vendor="HIP" if torch.version.hip else "CUDA",
                gpu=str(getattr(properties, "uuid", self._device.index)),
                multiprocessors=properties.multi_processor_count,
                flags=made.export(self.flags).hex(),
                data=made.export(self.data).hex(),
            )
        except (R4DError, RuntimeError) as error:
            return Offer(error=str(error).removeprefix("r4d: "))

    def _enter(self, table: int, rank: int, flags: int, data: int) -> None:
        world_size = self._layout.world_size
        for place, address in ((rank, flags), (world_size + rank, data)):
            self.runtime.write(self.flags + table + 8 * place, address.to_bytes(8, "little"))
