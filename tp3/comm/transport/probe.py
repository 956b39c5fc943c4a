"""The self-test of a pair: each end sends a pattern as data will travel, and looks at what came.

Some machines pass every call and deliver wrong bytes (peer access through an IOMMU or ACS).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tp3.comm.transport.device import DeviceTransport
from tp3.comm.transport.device_kernels import exchange_table

PROBE_BYTES = 256 << 10


def pattern(sender: int, receiver: int) -> Tensor:
    """[PROBE_BYTES] uint8 that no other pair sends."""
    seed = torch.Generator().manual_seed(65536 * sender + receiver + 1)
    return torch.randint(0, 256, (PROBE_BYTES,), dtype=torch.uint8, generator=seed)


def probe(transport: DeviceTransport, ranks: Sequence[int]) -> dict[int, str]:
    """What is wrong with the data from each of ``ranks``; "" for nothing."""
    rank, device = transport.rank, transport.device
    sent = {peer: pattern(rank, peer).to(device) for peer in ranks}
    came = {peer: torch.zeros(PROBE_BYTES, dtype=torch.uint8, device=device) for peer in ranks}
    everyone = range(transport.world_size)
    exchange_table(
        transport,
        [_place(sent.get(peer)) for peer in everyone],
        [_place(came.get(peer)) for peer in everyone],
    )
    torch.cuda.current_stream(device).synchronize()
    fault = transport.wrong()
    if fault:
        return dict.fromkeys(ranks, fault)
    return {peer: _difference(peer, rank, came[peer].cpu()) for peer in ranks}


def _place(data: Tensor | None) -> tuple[int, int]:
    return (0, 0) if data is None else (data.data_ptr(), data.numel())


def _difference(sender: int, receiver: int, came: Tensor) -> str:
    wrong = (came != pattern(sender, receiver)).nonzero().flatten()
    if not wrong.numel():
        return ""
    return (
        f"data that rank {sender} stores at rank {receiver} arrive wrong "
        f"({wrong.numel()} of {PROBE_BYTES} bytes, the first at {int(wrong[0])}); peer access "
        "between these GPUs does not work (IOMMU, ACS or a patched driver)"
    )
