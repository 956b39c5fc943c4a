"""Subgroups in every way torch has of making them, barriers, and worlds of one rank."""

import itertools
import time
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.ranks.reference import (
    BACKEND,
    MOVED,
    SUMMED,
    everyone,
    lacks,
    poisoned,
    raises,
    reduced,
    same,
    tensor,
)

F32 = torch.float32


def exercise(group, members, salt):
    """Collectives and messages in a group, `members` being its global ranks in group order."""
    me, size = dist.get_rank(), len(members)
    index = members.index(me)
    assert dist.get_rank(group) == index
    assert dist.get_world_size(group) == size
    assert dist.get_process_group_ranks(group) == members
    inputs = everyone(max(members) + 1, 23, F32, salt=salt)
    ours = [inputs[member] for member in members]
    mine = tensor(inputs[me], F32)
    dist.all_reduce(mine, group=group)
    same(f"all_reduce in {members}", mine, reduced("sum", ours))
    out = poisoned(size * 23, F32)
    work = dist.all_gather_into_tensor(out, tensor(inputs[me], F32), group=group, async_op=True)
    work.wait()
    same(f"all_gather in {members}", out, np.concatenate(ours))
    for index_of_src, src in enumerate(members):
        mine = tensor(inputs[me], F32)
        dist.broadcast(mine, src=src, group=group)
        same(f"broadcast from {src} in {members}", mine, inputs[src])
        mine = tensor(inputs[me], F32)
        dist.broadcast(mine, group_src=index_of_src, group=group)
        same(f"broadcast from group rank {index_of_src} of {members}", mine, inputs[src])
    if size > 1:
        after, before = members[(index + 1) % size], members[index - 1]
        out = poisoned(23, F32)
        work = dist.isend(tensor(inputs[me], F32), after, group=group)
        assert dist.recv(out, before, group=group) == before
        work.wait()
        same(f"message in {members}", out, inputs[before])
    outs = [None] * size
    dist.all_gather_object(outs, me, group=group)
    assert outs == members
    dist.barrier(group=group)


def new_group(rank, world_size):
    everybody = list(range(world_size))
    subsets = [everybody, everybody[::2], everybody[1:], [0, world_size - 1], [0]]
    groups = [dist.new_group(subset) for subset in subsets]
    for salt, (group, members) in enumerate(zip(groups, subsets)):
        if rank in members:
            assert dist.get_backend(group) == BACKEND
            exercise(group, members, salt)
        else:
            assert group == dist.GroupMember.NON_GROUP_MEMBER
    exercise(dist.group.WORLD, everybody, 9)
    for group, members in zip(groups, subsets):
        if rank in members:
            dist.destroy_process_group(group)
    exercise(dist.group.WORLD, everybody, 10)


def test_new_group_with_scattered_ranks(ranks):
    ranks(new_group)


def interleaved(rank, world_size):
    """Several groups in flight; works of one group waited for in any order."""
    whole = [dist.group.WORLD, dist.new_group(), dist.new_group()]
    rng = np.random.default_rng(rank)
    for round_ in range(40):
        pending = []
        for number, group in enumerate(whole):
            for size in (1, 1000 * (round_ % 4)):
                mine = torch.full((size,), float(rank + number + round_))
                work = dist.all_reduce(mine, group=group, async_op=True)
                pending.append((work, mine, number))
        if rng.random() < 0.1:
            time.sleep(0.01)
        for at in rng.permutation(len(pending)):
            work, mine, number = pending[at]
            work.wait()
            want = sum(range(world_size)) + world_size * (number + round_)
            same(f"round {round_} group {number}", mine, np.full(mine.shape, want))


def test_groups_interleaved_with_works_out_of_order(ranks):
    ranks(interleaved)


def new_subgroups(rank, world_size):
    size = 2 if world_size % 2 == 0 else world_size
    mine, _ = dist.new_subgroups(size)
    first = rank // size * size
    exercise(mine, list(range(first, first + size)), 1)
    lists = [[r for r in range(world_size) if r % 2 == parity] for parity in (0, 1)]
    if len(lists[0]) == len(lists[1]):
        mine, _ = dist.new_subgroups_by_enumeration(lists)
        exercise(mine, lists[rank % 2], 2)


def test_new_subgroups(ranks):
    ranks(new_subgroups)


@pytest.mark.parametrize("world_size", [4], ids=["W4"])
def test_subgroups_and_meshes_of_two_by_two(ranks):
    ranks(new_subgroups)
    ranks(device_mesh)


def split_group(rank, world_size):
    """torch 2.13 splits only what is bound to an accelerator, whatever the backend."""
    everybody = list(range(world_size))
    parts = [everybody[:1], everybody[1:]]
    raises(RuntimeError, dist.split_group, split_ranks=parts)
    exercise(dist.group.WORLD, everybody, 4)


def test_split_group_without_a_device_says_so(ranks):
    ranks(split_group)


def device_mesh(rank, world_size):
    shapes = [(world_size,), (1, world_size), (world_size, 1)]
    if world_size % 2 == 0:
        shapes.append((2, world_size // 2))
    for shape in shapes:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)])
        for name in mesh.mesh_dim_names:
            members = mesh[name].mesh.tolist()
            exercise(mesh[name].get_group(), members, 5)


def test_device_mesh(ranks):
    ranks(device_mesh)


def barriers(rank, world_size):
    for late, async_op in itertools.product(range(world_size), (False, True)):
        if rank == late:
            time.sleep(0.1)
        entered = torch.tensor([time.monotonic()], dtype=torch.float64)
        work = dist.barrier(async_op=async_op)
        if async_op:
            work.wait()
        left = time.monotonic()
        all_entered = poisoned(world_size, torch.float64)
        dist.all_gather_into_tensor(all_entered, entered)
        assert left >= float(all_entered.max()), f"left the barrier before rank {late} entered"


def test_barrier_waits_for_the_last(ranks):
    ranks(barriers)


def monitored(rank, world_size):
    dist.monitored_barrier(timeout=timedelta(seconds=20))
    dist.monitored_barrier(timeout=timedelta(seconds=20), wait_all_ranks=True)
    if rank == world_size - 1:
        time.sleep(1.5)
        return
    if rank == 0:
        message = raises(
            RuntimeError,
            dist.monitored_barrier,
            timeout=timedelta(seconds=0.5),
            wait_all_ranks=True,
        )
        assert str(world_size - 1) in message, message
    else:
        raises(RuntimeError, dist.monitored_barrier, timeout=timedelta(seconds=1))


def test_monitored_barrier_names_the_missing_rank(ranks):
    if not lacks("monitored_barrier"):
        ranks(monitored)


def alone(rank, world_size):
    for dtype in (dtype for dtype in SUMMED if not lacks("all_reduce", dtype)):
        mine = tensor(everyone(1, 9, dtype)[0], dtype)
        same(f"all_reduce {dtype}", _after(dist.all_reduce, mine), mine)
        same(f"reduce {dtype}", _after(dist.reduce, mine, dst=0), mine)
        out = poisoned(9, dtype)
        dist.reduce_scatter_tensor(out, mine)
        same(f"reduce_scatter {dtype}", out, mine)
    for dtype in (dtype for dtype in MOVED if not lacks("all_gather", dtype)):
        mine = tensor(everyone(1, 9, dtype)[0], dtype)
        same(f"broadcast {dtype}", _after(dist.broadcast, mine, src=0), mine)
        for function in (dist.all_gather_into_tensor, dist.all_to_all_single):
            out = poisoned(9, dtype)
            function(out, mine)
            same(f"{function.__name__} {dtype}", out, mine)
    outs = [None]
    dist.all_gather_object(outs, "me")
    assert outs == ["me"]
    dist.barrier()
    work = dist.all_reduce(torch.ones(1), op=dist.ReduceOp.AVG, async_op=True)
    work.wait()


def _after(function, mine, **kwargs):
    mine = mine.clone()
    function(mine, **kwargs)
    return mine


@pytest.mark.parametrize("world_size", [1], ids=["W1"])
def test_one_rank_is_the_identity(ranks):
    ranks(alone)
