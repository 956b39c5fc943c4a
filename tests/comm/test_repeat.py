"""``Group.repeat``: the short way of an all-reduce like one before, taken by nothing else."""

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

from tp3.comm.errors import R4DError
from tp3.comm.group import Group

DEVICE = torch.device("meta")  # stands for a GPU: has shapes and devices, no memory
NUMEL = 4096


class Plan:
    """What a row has settled; counts its starts."""

    def __init__(self, error=None):
        self.started, self.error = [], error

    def start(self, x, out):
        self.started.append((x, out))
        if self.error:
            raise self.error


def group_with(plan):
    group = Group(HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=5))
    group._device = SimpleNamespace(
        device=DEVICE,
        known={(torch.bfloat16, NUMEL, "SUM"): (plan, "all_reduce/gpu-sentinel")},
        queue=SimpleNamespace(submit=lambda call, result, sync: call()),
        close=lambda timeout: None,
        leave=lambda: None,
    )
    return group


def x(numel=NUMEL, dtype=torch.bfloat16, device=DEVICE):
    return torch.empty(numel, dtype=dtype, device=device)


def test_a_call_like_one_before_starts_its_kernel_and_is_counted():
    plan = Plan()
    group, tensor = group_with(plan), x()
    before = group.calls
    assert group.repeat(tensor, "SUM")
    assert plan.started == [(tensor, tensor)]
    assert group.stats() == {"all_reduce/gpu-sentinel": 1}
    assert group.calls == before + 1
    group.close()


@pytest.mark.parametrize(
    ("tensor", "op"),
    [
        (x(device="cpu"), "SUM"),
        (x(dtype=torch.float16), "SUM"),
        (x(NUMEL - 8), "SUM"),
        (x(), "MAX"),
        (x(2 * NUMEL)[::2], "SUM"),
    ],
    ids=["on-the-cpu", "dtype", "size", "op", "strided"],
)
def test_nothing_else_takes_it(tensor, op):
    plan = Plan()
    group = group_with(plan)
    assert not group.repeat(tensor, op)
    assert not plan.started
    group.close()


def test_the_sum_may_go_elsewhere():
    plan = Plan()
    group, tensor, out = group_with(plan), x(), x()
    assert group.repeat(tensor, "SUM", out)
    assert plan.started == [(tensor, out)]
    assert not group.repeat(tensor, "SUM", x(2 * NUMEL)[::2])
    assert len(plan.started) == 1
    group.close()


def test_a_profile_gets_the_long_way_which_names_the_call():
    plan = Plan()
    group = group_with(plan)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert not group.repeat(x(), "SUM")
    assert not plan.started
    group.close()


def test_a_kernel_that_cannot_start_makes_the_group_unusable():
    group = group_with(Plan(RuntimeError("no image")))
    with pytest.raises(RuntimeError, match="no image"):
        group.repeat(x(), "SUM")
    assert group.transport.failure == "r4d: RuntimeError: no image"
    group.close()


def test_not_after_the_end():
    group = group_with(Plan())
    group.close()
    with pytest.raises(R4DError, match="destroyed"):
        group.repeat(x(), "SUM")


def test_the_debug_level_is_seen():
    before = dist.get_debug_level()
    try:
        for level in (dist.DebugLevel.OFF, dist.DebugLevel.DETAIL):
            dist.set_debug_level(level)
            group = Group(HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=5))
            assert group._detail == (level == dist.DebugLevel.DETAIL)
            group.close()
    finally:
        dist.set_debug_level(before)
