"""Slots grow for all ranks or for none, and either way a large message arrives."""

import torch
import torch.distributed as dist

from tp3.comm.launch import launch
from tp3.comm.transport import bootstrap, segment

WORLD_SIZE = 3
SMALL = 64 << 10
NUMEL = 300_001


def slot_bytes_after_a_large_sum(rank):
    group = dist.new_group()
    data = torch.arange(NUMEL, dtype=torch.int64) + rank
    dist.all_reduce(data, group=group)
    assert torch.equal(data, WORLD_SIZE * torch.arange(NUMEL) + 3)
    return group.group.transport.slot_bytes


def growing(rank, world_size):
    return slot_bytes_after_a_large_sum(rank)


def test_a_large_message_makes_larger_slots_of_one_size():
    sizes = set(launch(growing, WORLD_SIZE))
    assert len(sizes) == 1
    assert sizes.pop() >= NUMEL * 8 * 2 // WORLD_SIZE


def refusing(rank, world_size):
    attach = segment.attach

    def refuse(path, nbytes):
        if rank == 2 and path.startswith("/proc"):
            raise PermissionError(path)
        return attach(path, nbytes)

    segment.attach = refuse
    return slot_bytes_after_a_large_sum(rank)


def test_one_rank_that_cannot_attach_keeps_the_small_slots_of_all():
    assert launch(refusing, WORLD_SIZE) == [SMALL] * WORLD_SIZE


def apart(rank, world_size):
    bootstrap.pid_namespace = lambda: f"pid:[{rank == 2}]"
    opened = []
    attach = segment.attach
    segment.attach = lambda path, nbytes: opened.append(path) or attach(path, nbytes)
    size = slot_bytes_after_a_large_sum(rank)
    assert not [path for path in opened if str(path).startswith("/proc")]
    return size


def test_ranks_in_two_pid_namespaces_open_nothing_by_pid():
    assert launch(apart, WORLD_SIZE) == [SMALL] * WORLD_SIZE
