"""Calls made under torch's modes and from callbacks do what they do without."""

import threading

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.ranks.faults import CALLS, LARGE, TIMEOUT, new_group, ones
from tp3.comm.launch import launch


def everything(group, world_size):
    """Each kind of call, synchronous and not; messages larger than a ring."""
    rank = dist.get_rank()
    for call in CALLS.values():
        call(1000, group)
    for dtype in (torch.float32, torch.bfloat16):
        for numel in (3, LARGE):
            data = torch.ones(numel, dtype=dtype, device="cpu")
            dist.all_reduce(data, group=group)
            dist.all_reduce(data, group=group, async_op=True).wait()
            assert (data == world_size**2).all()
    out = torch.zeros(LARGE, device="cpu")
    receiving = dist.irecv(out, (rank - 1) % world_size, group=group)
    sending = dist.isend(torch.ones(LARGE, device="cpu"), (rank + 1) % world_size, group=group)
    dist.barrier(group=group)  # while the group's thread moves them
    sending.wait()
    receiving.wait()
    assert (out == 1).all()


def in_inference_mode(rank, world_size):
    with torch.inference_mode():
        inside = new_group()
        everything(None, world_size)
        everything(inside, world_size)
        data = ones()
    everything(inside, world_size)
    dist.all_reduce(data)
    dist.all_reduce(data, async_op=True).wait()
    assert data.tolist() == [world_size**2] * 16


def test_inference_mode_around_calls_groups_and_tensors():
    launch(in_inference_mode, 3, timeout=TIMEOUT)


def on_another_device(rank, world_size):
    with torch.device("meta"):
        data = ones_on_cpu(5000)
        for dtype in (torch.float32, torch.bfloat16):
            data = data.to(dtype)
            dist.all_reduce(data)
            dist.reduce(data, 0)
            dist.all_gather([ones_on_cpu(2) for _ in range(3)], ones_on_cpu(2))
        dist.monitored_barrier()
        if rank < 2:
            (dist.recv if rank else dist.send)(ones_on_cpu(9), 1 - rank)


def ones_on_cpu(numel):
    return torch.ones(numel, device="cpu")


def test_another_default_device():
    launch(on_another_device, 3, timeout=TIMEOUT)


def with_gradients(rank, world_size):
    weight = torch.full((4,), 2.0, requires_grad=True)
    dist.broadcast(weight, 0)
    dist.all_reduce(weight.detach())
    assert weight.tolist() == [6.0] * 4
    (weight * 3).sum().backward()
    dist.all_reduce(weight.grad)
    assert weight.grad.tolist() == [9.0] * 4


def test_parameters_and_their_gradients():
    launch(with_gradients, 3, timeout=TIMEOUT)


def from_callbacks(rank, world_size):
    """What ends calls further calls, also to the group itself."""
    ended = threading.Event()
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    outs = [torch.zeros(LARGE), torch.zeros(7)]

    def go_on(_):
        dist.isend(torch.full((7,), rank + 1.0), after, tag=2)
        ended.set()

    sending = dist.isend(torch.ones(LARGE), after, tag=1)
    sending.get_future().then(go_on)
    dist.recv(outs[0], before, tag=1)
    sending.wait()
    assert ended.wait(TIMEOUT)
    dist.recv(outs[1], before, tag=2)
    assert outs[1].tolist() == [before + 1.0] * 7


def test_callbacks_may_send():
    launch(from_callbacks, 3, timeout=TIMEOUT)


def from_threads(rank, world_size):
    """Groups are independent: a thread for each of them."""
    groups = [new_group() for _ in range(4)]
    sums = [[] for _ in groups]

    def work(number):
        for call in range(50):
            data = torch.full((100 * number + 1,), float(call))
            dist.all_reduce(data, group=groups[number], async_op=call % 2 == 0)
            sums[number].append(data)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(groups))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for group in groups:
        dist.barrier(group=group)  # asynchronous calls have ended: order of calls
    for data in sums:
        assert [d[0].item() for d in data] == [world_size * call for call in range(50)]


def test_a_thread_for_each_group():
    launch(from_threads, 3, timeout=TIMEOUT)


FACTORS = [2.0, torch.tensor([2.0]), torch.tensor([2.0], dtype=torch.float64)]


def factors(rank, world_size, dtype):
    for factor in FACTORS:
        data = torch.ones(10, dtype=dtype)
        dist.all_reduce(data, op=dist._make_nccl_premul_sum(factor))
        assert data.tolist() == [2.0 * world_size] * 10
        assert data.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_factor_of_another_dtype(dtype):
    launch(factors, 2, dtype, timeout=TIMEOUT)


def odd_tensors(rank, world_size):
    """Memory that torch did not allocate, scalars, one element with an odd stride, views."""
    array = np.arange(12, dtype=np.float32).reshape(3, 4).T
    tensors = [
        torch.from_numpy(array),
        torch.tensor(11.0),
        torch.arange(12.0)[::7][1:],
        torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1)[1:, :, 1],
        torch.nn.Parameter(torch.arange(4.0)),
    ]
    for tensor in tensors:
        want = tensor.detach().clone() * world_size
        dist.all_reduce(tensor)
        assert torch.equal(tensor, want), tensor
    assert array.tolist() == (world_size * np.arange(12.0).reshape(3, 4).T).tolist()


def test_odd_tensors():
    launch(odd_tensors, 3, timeout=TIMEOUT)
