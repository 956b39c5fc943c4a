"""Ranks make different calls: an error with both sides on every rank, and the group is unusable."""

import pytest
import torch
import torch.distributed as dist

from tests.ranks.faults import LARGE, SOON, TIMEOUT, check_unusable, failing, many, new_group, ones
from tp3.comm.errors import Disagreement
from tp3.comm.launch import launch
from tp3.comm.layout import SIGNATURE_BYTES
from tp3.comm.signature import signature

SUM, MAX = dist.ReduceOp.SUM, dist.ReduceOp.MAX
CULPRIT = 1


def to_all(*sizes):
    return lambda g: dist.all_to_all(many(3), [ones(size) for size in sizes], group=g)


def zero_then_barrier(group):
    dist.all_reduce(ones(0), group=group)
    dist.barrier(group=group)


# name: what ranks 0 and 2 call, what rank 1 calls, words of the error
DIFFERENT = {
    "shapes": (
        lambda g: dist.all_reduce(ones(3), group=g),
        lambda g: dist.all_reduce(ones(4), group=g),
        ["all_reduce SUM float32[3]", "float32[4]"],
    ),
    "algorithms": (
        lambda g: dist.all_reduce(ones(3), group=g),
        lambda g: dist.all_reduce(ones(LARGE), group=g),
        ["all_reduce SUM float32[3]", f"float32[{LARGE}]"],
    ),
    "dtypes": (
        lambda g: dist.broadcast(ones(3), 0, group=g),
        lambda g: dist.broadcast(ones(3).half(), 0, group=g),
        ["broadcast float32[3]", "broadcast float16[3]"],
    ),
    "ops": (
        lambda g: dist.reduce(ones(3), 0, SUM, group=g),
        lambda g: dist.reduce(ones(3), 0, MAX, group=g),
        ["reduce SUM", "reduce MAX"],
    ),
    "roots": (
        lambda g: dist.broadcast(ones(3), 0, group=g),
        lambda g: dist.broadcast(ones(3), 1, group=g),
        ["root 0", "root 1"],
    ),
    "collectives": (
        lambda g: dist.all_reduce(ones(3), group=g),
        lambda g: dist.barrier(group=g),
        ["all_reduce SUM float32[3]", "barrier"],
    ),
    "asynchronous": (
        lambda g: dist.all_reduce(ones(3), group=g, async_op=True).wait(),
        lambda g: dist.all_reduce(ones(3).double(), group=g),
        ["float32[3]", "float64[3]"],
    ),
    "all_gather sizes": (
        lambda g: dist.all_gather(many(3), ones(3), group=g),
        lambda g: dist.all_gather([ones(3), ones(4), ones(3)], ones(4), group=g),
        ["all_gather: rank 1 sends float32[4] to rank 0", "expects float32[3]"],
    ),
    "all_gather_into_tensor sizes": (
        lambda g: dist.all_gather_into_tensor(ones(9), ones(3), group=g),
        lambda g: dist.all_gather_into_tensor(ones(6), ones(2), group=g),
        ["float32[3]", "float32[2]"],
    ),
    "reduce_scatter sizes": (
        lambda g: dist.reduce_scatter(ones(3), many(3), group=g),
        lambda g: dist.reduce_scatter(ones(3), [ones(3), ones(3), ones(2)], group=g),
        ["float32[3, 3, 3]", "float32[3, 3, 2]"],
    ),
    "all_to_all sizes": (
        to_all(3, 3, 3),
        to_all(3, 3, 5),
        ["all_to_all: rank 1 sends float32[5] to rank 2", "expects float32[3]"],
    ),
    "zero and not": (
        lambda g: dist.all_reduce(ones(3), group=g),
        zero_then_barrier,
        ["float32[3]", "barrier"],
    ),
}


def disagreeing(rank, world_size, names):
    for name in names:
        left, right, words = DIFFERENT[name]
        group = new_group()
        seconds, error = failing(right if rank == CULPRIT else left, group, errors=Disagreement)
        assert all(word in str(error) for word in words), (name, str(error))
        assert f"rank {CULPRIT}" in str(error), (name, str(error))
        assert seconds < SOON
        check_unusable(group)
    dist.barrier()


@pytest.mark.parametrize("half", [0, 1])
def test_calls_that_differ(half):
    launch(disagreeing, 3, [*DIFFERENT][half::2], timeout=TIMEOUT)


def test_texts_that_are_too_long_still_differ():
    shapes = [tuple(range(1000, 1100)), (*range(1000, 1099), 7)]
    texts = [signature("all_reduce", torch.float32, shape, op="SUM") for shape in shapes]
    assert texts[0] != texts[1]
    assert all(len(text) == SIGNATURE_BYTES for text in texts)


def differing_messages(rank, world_size):
    for sent, received in ((ones(3), ones(4)), (ones(3), ones(3).int()), (ones(0), ones(1))):
        group = new_group()
        if rank == 0:
            dist.send(sent, 1, group=group)
        if rank == 1:
            error = failing(lambda g=group, r=received: dist.recv(r, 0, g), errors=Disagreement)[1]
            for side in (sent, received):
                assert f"{str(side.dtype)[6:]}{list(side.shape)}" in str(error), error
            check_unusable(group)
        dist.barrier()
        if rank == 2:  # learns of it from its next call
            assert "rank 1" in str(failing(lambda g=group: dist.barrier(g))[1])
        dist.barrier()


def test_messages_that_differ():
    launch(differing_messages, 3, timeout=TIMEOUT)


def agreeing_in_everything_but_the_way(rank, world_size):
    """What must not be an error: layout, storage and synchronicity are a rank's own affair."""
    data = [ones(12), ones(24)[::2], ones(30)[7:19]][rank]
    work = dist.all_reduce(data, async_op=rank == 1)
    if work:
        work.wait()
    assert data.tolist() == [3.0] * 12
    view = [ones(12).view(3, 4), ones(12).view(4, 3).T, ones(12).view(3, 4)][rank]
    dist.all_reduce(view)
    assert (view == 3).all()


def test_layout_and_asynchrony_may_differ():
    launch(agreeing_in_everything_but_the_way, 3, timeout=TIMEOUT)
