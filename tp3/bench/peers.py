"""Who is measured: r4d, the default group, and the peers that can be set up beside it.

A peer that cannot be set up, or whose sum is wrong, is left out with a reason. Symmetric memory is
torch's own (``torch.distributed._symmetric_memory``, 2.11 to 2.13): its one-shot returns a new
tensor, its two-shot works in place, both on memory that all ranks have mapped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tp3.bench.ranks import Rank

# NVLink multicast stays off, in NCCL and in symmetric memory. Without the implicit pool a symmetric
# tensor starts its allocation; the operators address it by its storage offset alone.
ENV = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "TORCH_SYMMMEM_IMPLICIT_POOL": "0",
}
SETUP_S = 120
TRIAL_NUMEL = 1024


@dataclass(frozen=True)
class Peer:
    """reduce(x): the sum over the ranks, in x or in a new tensor, on the current stream.

    room: flat memory that x must lie in. exact: held to r4d's bound, see ``gate``.
    """

    name: str
    reduce: Callable[[Tensor], Tensor]
    room: Tensor
    exact: bool = False


def r4d(rank: Rank, room: Tensor) -> list[Peer]:
    return [Peer("r4d", _in_place(None), room, exact=True)]


def gloo(rank: Rank, room: Tensor) -> list[Peer]:
    return [Peer("gloo", _in_place(rank.host), room)]


def nccl(rank: Rank, room: Tensor) -> list[Peer]:
    return [Peer("nccl", _in_place(_nccl_group(rank)), room)]


def symmetric(rank: Rank, room: Tensor) -> list[Peer]:
    group = _nccl_group(rank)
    import torch.distributed._symmetric_memory as symm_mem

    mapped = symm_mem.empty(room.numel(), dtype=room.dtype, device=room.device)
    symm_mem.rendezvous(mapped, group=group.group_name)
    ops, name = torch.ops.symm_mem, group.group_name
    return [
        Peer("symm one-shot", lambda x: ops.one_shot_all_reduce(x, "sum", name), mapped),
        Peer("symm two-shot", lambda x: ops.two_shot_all_reduce_(x, "sum", name), mapped),
    ]


Setup = Callable[[Rank, Tensor], list[Peer]]
# By device: the names of the peers, and what sets them up, on all ranks in this order.
SETUPS: dict[str, dict[tuple[str, ...], Setup]] = {
    "cuda": {("nccl",): nccl, ("symm one-shot", "symm two-shot"): symmetric},
    "cpu": {("gloo",): gloo},
}


def set_up(rank: Rank, room_bytes: int) -> tuple[dict[str, Peer], dict[str, str]]:
    """The peers by name, r4d first, and why the others are left out; the same on all ranks."""
    room = torch.empty(room_bytes // rank.dtype.itemsize, dtype=rank.dtype, device=rank.device)
    (first,) = r4d(rank, room)
    peers = {first.name: first}
    left_out: dict[str, str] = {}
    for names, setup in SETUPS[rank.device.type].items():
        made, reason = rank.attempt(partial(setup, rank, room))
        if made is None:
            left_out |= dict.fromkeys(names, reason)
            continue
        for peer in made:
            _, reason = rank.attempt(partial(_trial, rank, peer))
            if reason:
                left_out[peer.name] = reason
            else:
                peers[peer.name] = peer
    return peers, left_out


def _in_place(group: Any) -> Callable[[Tensor], Tensor]:
    def reduce(x: Tensor) -> Tensor:
        dist.all_reduce(x, group=group)
        return x

    return reduce


def _nccl_group(rank: Rank) -> Any:
    if rank.shared:
        raise ValueError("ranks share a GPU, and NCCL and symmetric memory want one for each rank")
    return dist.new_group(backend="nccl", timeout=timedelta(seconds=SETUP_S))


def _trial(rank: Rank, peer: Peer) -> None:
    x = peer.room[:TRIAL_NUMEL]
    x.fill_(rank.rank + 1)
    total = peer.reduce(x)
    rank.wait()
    expected = rank.world_size * (rank.world_size + 1) // 2
    off = (total != expected).nonzero()
    if len(off):
        at = int(off[0])
        raise RuntimeError(f"its first sum is {float(total[at])} at {at}, expected {expected}")
