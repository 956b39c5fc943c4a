"""Ranks on GPUs that come late, die or leave, and what is left afterwards."""

import logging
import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.gpu.ranks import MARKS, SOON, group, on_gpus
from tests.gpu.test_device import streams
from tp3.comm.errors import CollectiveTimeout, R4DError

pytestmark = MARKS


def absent(rank, world_size):
    x = torch.ones(4096, dtype=torch.bfloat16, device="cuda")
    dist.all_reduce(x)
    torch.cuda.synchronize()
    dist.barrier()
    group().set_timeout(timedelta(seconds=2))
    if rank == 2:
        time.sleep(6)
        return ""
    y, z = torch.ones(4096, dtype=torch.bfloat16, device="cuda"), x.clone()
    dist.all_reduce(y)
    torch.cuda.synchronize()
    assert y.isnan().all()
    with pytest.raises(CollectiveTimeout) as error:
        dist.all_reduce(z)
    with pytest.raises(R4DError, match="unusable"):
        dist.all_reduce(z)
    assert (torch.ones(8, device="cuda") * 2 == 2).all()
    return str(error.value)


def test_a_rank_that_does_not_come_is_named_and_the_sum_is_nan():
    first, second, _ = on_gpus(absent)
    for text in (first, second):
        assert "reached its timeout of 2 s" in text
        assert "rank(s) 2 did not arrive" in text


def killed(rank, world_size):
    x = torch.ones(1 << 20, device="cuda")
    dist.all_reduce(x)
    torch.cuda.synchronize()
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    dist.all_reduce(x)
    torch.cuda.synchronize()
    assert time.monotonic() - start < SOON
    assert x.isnan().all()
    with pytest.raises(R4DError, match=r"rank 1 .*died"):
        dist.all_reduce(x)
    assert (torch.ones(8, device="cuda") * 2 == 2).all()


def test_a_rank_killed_while_kernels_wait_for_it():
    on_gpus(killed, expect_dead=[1])
    on_gpus(streams)  # the GPU is usable at once


def one_leaves(rank, world_size):
    """Two go on with messages long after the watch has seen the third leave."""
    if rank == 2:
        dist.destroy_process_group()
        return
    came = torch.empty(1000, device="cuda")
    for turn in range(8):
        mine = torch.full((1000,), float(rank + turn), device="cuda")
        sending = dist.isend(mine, 1 - rank)
        dist.recv(came, 1 - rank)
        sending.wait()
        assert (came == 1 - rank + turn).all()
        time.sleep(0.2)


def test_messages_go_on_when_a_third_rank_leaves():
    on_gpus(one_leaves)


def destroyed_while_a_message_waits(rank, world_size):
    from triton.language import constexpr

    from tp3.kernels import primitives

    primitives.HURRY_NS = constexpr(2_000_000_000)
    records, handler = [], logging.Handler()
    handler.emit = records.append
    logging.getLogger("tp3.comm.device").addHandler(handler)
    x = torch.ones(1000, device="cuda")
    dist.all_reduce(x)
    dist.irecv(x, 1 - rank)
    start = time.monotonic()
    dist.destroy_process_group()
    assert time.monotonic() - start < SOON
    return [record.getMessage() for record in records]


def test_destroying_a_group_does_not_wait_for_messages_that_never_come():
    for told in on_gpus(destroyed_while_a_message_waits, world_size=2):
        assert any("a message was pending when its group was destroyed" in text for text in told)


def rounds(rank, world_size):
    free = []
    for turn in range(100):
        made = dist.new_group()
        x = torch.ones(4096, device="cuda")
        dist.all_reduce(x, group=made)
        assert (x == world_size).all()
        dist.destroy_process_group(made)
        torch.cuda.synchronize()
        dist.barrier()
        if turn >= 5:
            free.append(torch.cuda.mem_get_info()[0])
        dist.barrier()
    return min(free[-5:]) - max(free[:5])


def test_groups_leave_no_device_memory_behind():
    """Looks at the memory of the whole GPU: nothing else may run on it."""
    assert all(change > -(8 << 20) for change in on_gpus(rounds))
