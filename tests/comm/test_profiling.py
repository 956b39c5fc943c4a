"""What a profile shows of collectives."""

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from tp3.comm.launch import launch


def calls(asynchronous):
    x = torch.ones(8)
    for work in [dist.all_reduce(x, async_op=asynchronous) for _ in range(3)]:
        if asynchronous:
            work.wait()
    dist.barrier()


def profiled(rank, world_size, asynchronous):
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        calls(asynchronous)
        dist.all_gather_object([None] * world_size, 0)  # the works' threads have ended by then
    calls(asynchronous)  # what nobody records
    return [(event.name, event.is_async) for event in profiled.events()]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_collectives_are_events(asynchronous):
    for events in launch(profiled, 2, asynchronous):
        found = [is_async for name, is_async in events if name == "r4d:all_reduce"]
        assert len(found) == 3
        assert not asynchronous or all(found)
        assert "r4d:barrier" in [name for name, _ in events]
