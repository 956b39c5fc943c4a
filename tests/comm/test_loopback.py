"""Messages of a rank to itself."""

import pytest
import torch
import torch.distributed as dist

from tp3.comm.errors import Disagreement
from tp3.comm.launch import launch
from tp3.comm.loopback import Loopback


def numbers(start):
    return torch.arange(start, start + 6.0).view(2, 3)


@pytest.mark.parametrize("order", ["ssrr", "rrss", "srsr", "rsrs", "rssr"])
def test_messages_meet_in_order_whoever_is_posted_first(order):
    loop, sent, received = Loopback(0), [], []
    for kind in order:
        if kind == "s":
            data = numbers(10 * len(sent))
            sent.append(data.clone())
            loop.send(data, 7)
            data.fill_(-1)  # sent is sent
        else:
            target = torch.empty(3, 2).T
            received.append((target, loop.recv(target, 7)))
    assert loop.recv(torch.empty(2, 3), 8).is_completed() is False
    for want, (target, work) in zip(sent, received, strict=True):
        assert work.wait()
        assert work.source_rank() == 0
        assert torch.equal(target, want)


def test_another_shape_and_a_missing_send_are_refused_at_once():
    loop = Loopback(2)
    loop.send(numbers(0), 0)
    with pytest.raises(Disagreement, match=r"rank 2 sends float32\[2, 3\].*float32\[6\]"):
        loop.recv(torch.empty(6), 0).wait()
    with pytest.raises(ValueError, match=r"rank 2 waits for float32\[6\] from itself.*send first"):
        loop.recv(torch.empty(6), 0).wait()


def a_ring_and_itself(rank, world_size):
    targets = [torch.empty(4) for _ in range(2)]
    following, before = (rank + 1) % world_size, (rank - 1) % world_size
    ops = [
        dist.P2POp(dist.irecv, targets[0], rank),
        dist.P2POp(dist.isend, torch.full((4,), float(rank)), rank),
        dist.P2POp(dist.isend, torch.full((4,), 10.0 + rank), following),
        dist.P2POp(dist.irecv, targets[1], before),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert (targets[0] == rank).all()
    assert (targets[1] == 10 + before).all()


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_batch_may_hold_messages_to_itself(world_size):
    launch(a_ring_and_itself, world_size)
