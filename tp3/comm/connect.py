"""From a store to a rank's connections: who shares memory with whom decides what carries it."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from tp3.comm.layout import HostLayout
from tp3.comm.p2p import Channels
from tp3.comm.settings import Settings
from tp3.comm.span_channels import SpanChannels
from tp3.comm.transport.bootstrap import Meeting, Member, introduce, share
from tp3.comm.transport.host import HostTransport
from tp3.comm.transport.span import SpanTransport


@dataclass(frozen=True)
class Connection:
    """What a rank has once it has met the others."""

    transport: HostTransport | SpanTransport
    channels: Channels | SpanChannels
    settings: Settings


def connect(meeting: Meeting) -> Connection:
    """Meet the other ranks and connect to them; R4DError on every rank when one of them cannot."""
    members = introduce(meeting)
    settings = members[meeting.rank].settings
    hosts = by_host(members)
    neighbours = next(ranks for ranks in hosts if meeting.rank in ranks)
    local = _local(meeting, members, neighbours, settings)
    if len(hosts) == 1:
        return Connection(local, Channels(local), settings)
    span = meeting.vote("span", lambda: _span(meeting, hosts, local))
    return Connection(span, SpanChannels(span), settings)


def by_host(members: list[Member]) -> list[tuple[int, ...]]:
    """The group's ranks by the memory they can share, each host's ascending."""
    hosts: dict[str, tuple[int, ...]] = {}
    for rank, member in enumerate(members):
        hosts[member.memory] = (*hosts.get(member.memory, ()), rank)
    return list(hosts.values())


def _local(
    meeting: Meeting, members: list[Member], ranks: tuple[int, ...], settings: Settings
) -> HostTransport:
    layout = HostLayout.small(len(ranks))
    own = members[meeting.rank].pids
    # Larger slots are shared by a path under /proc/PID, which elsewhere names another process.
    one_namespace = len({members[r].pids for r in ranks}) == 1

    def join(memory: mmap.mmap) -> HostTransport:
        return HostTransport(
            memory,
            layout,
            rank=ranks.index(meeting.rank),
            processes=[members[r].process if members[r].pids == own else None for r in ranks],
            timeout=meeting.timeout.total_seconds(),
            budget_bytes=settings.shm_bytes if one_namespace else 0,
        )

    return share(meeting, ranks, layout, join)


def _span(meeting: Meeting, hosts: list[tuple[int, ...]], local: HostTransport) -> SpanTransport:
    def gloo(name: str, ranks: tuple[int, ...]) -> Any:
        store = PrefixStore(f"gloo/{name}/", meeting.store)
        return dist.ProcessGroupGloo(store, ranks.index(meeting.rank), len(ranks), meeting.timeout)

    parts = min(len(ranks) for ranks in hosts)
    place = local.rank
    return SpanTransport(
        local,
        gloo("everyone", tuple(range(meeting.world_size))),
        gloo(f"across-{place}", tuple(ranks[place] for ranks in hosts)) if place < parts else None,
        rank=meeting.rank,
        world_size=meeting.world_size,
        hosts=len(hosts),
        parts=parts,
    )
