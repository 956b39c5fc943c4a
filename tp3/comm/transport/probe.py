"""The self-test of a pair: each end sends a pattern as data will travel, and looks at what came.

Some machines pass every call and deliver wrong bytes (peer access through an IOMMU or ACS).
"""

from __future__ import annotations

import torch
from torch import Tensor

from tp3.comm.transport.device import DeviceTransport
from tp3.comm.transport.device_kernels import exchange_table
from tp3.comm.transport.streams import streams_of

PROBE_BYTES = 256 << 10


def pattern(sender: int, receiver: int) -> Tensor:
    """[PROBE_BYTES] uint8 that no other pair sends."""
    seed = torch.Generator("cpu").manual_seed(65536 * sender + receiver + 1)
    shape = (PROBE_BYTES,)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=seed, device="cpu")


class PatternProbe:
    """The self-test with one peer, which has mapped this rank's memory as this rank has its.

    Runs beside everything else, self-tests with other peers included: ranks begin theirs in any
    order.
    """

    def __init__(self, transport: DeviceTransport, peer: int) -> None:
        self._transport, self._peer = transport, peer
        self._stream = streams_of(transport.device).take()
        nothing = [(0, 0)] * transport.world_size
        sends, receives = list(nothing), list(nothing)
        with torch.cuda.stream(self._stream):
            self._sent = pattern(transport.rank, peer).to(transport.device)
            self._came = torch.zeros_like(self._sent)
            sends[peer], receives[peer] = _place(self._sent), _place(self._came)
            exchange_table(transport, sends, receives, trial=True)

    def ended(self) -> bool:
        return bool(self._stream.query())

    def fault(self) -> str:
        """What is wrong with the data that came, "" for nothing."""
        with torch.cuda.stream(self._stream):
            came = self._came.cpu()
        streams_of(self._transport.device).give_back([self._stream])
        return self._transport.wrong() or _difference(self._peer, self._transport.rank, came)


def _place(data: Tensor) -> tuple[int, int]:
    return data.data_ptr(), data.numel()


def _difference(sender: int, receiver: int, came: Tensor) -> str:
    wrong = (came != pattern(sender, receiver)).nonzero().flatten()
    if not wrong.numel():
        return ""
    return (
        f"data that rank {sender} stores at rank {receiver} arrive wrong "
        f"({wrong.numel()} of {PROBE_BYTES} bytes, the first at {int(wrong[0])}); peer access "
        "between these GPUs does not work (IOMMU, ACS or a patched driver)"
    )
