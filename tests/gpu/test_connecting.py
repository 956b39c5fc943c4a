"""How ranks on GPUs connect: pair by pair, and through the host where that cannot be.

What the pairs say to each other is tested without a GPU, in tests/comm/test_pairs.py.
"""

import logging
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.gpu.ranks import MARKS, SIZES, SOON, Sums, group, on_gpus
from tp3.comm.errors import R4DError

pytestmark = MARKS


def first_messages(rank, world_size, step):
    """The first receive waits on the device while the first send, of other alignment, starts."""
    before, after = (rank - step) % world_size, (rank + step) % world_size
    came = torch.empty(8 if before else 1, device="cuda")
    sent = torch.full((8 if rank else 1,), float(rank), device="cuda")
    receiving = dist.irecv(came, before)
    sending = dist.isend(sent, after)
    receiving.wait()
    sending.wait()
    assert (came == before).all()
    assert not any(name.endswith("through-host") for name in group().stats())


@pytest.mark.parametrize(("world_size", "step"), [(3, 1), (3, -1), (4, 1)])
def test_a_ring_of_first_messages_connects_and_loads_before_one_waits(world_size, step):
    on_gpus(first_messages, step, world_size=world_size)


def killed_before(rank, world_size, message):
    """The ranks have not yet shared their memory."""
    torch.zeros(8, device="cuda")
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start, x = time.monotonic(), torch.ones(1000, device="cuda")
    with pytest.raises(R4DError, match=r"rank 1 .*died"):
        dist.recv(x, 1) if message else dist.all_reduce(x)
    assert time.monotonic() - start < SOON


@pytest.mark.parametrize("message", [False, True])
def test_a_rank_killed_before_its_memory_is_mapped(message):
    on_gpus(killed_before, message, expect_dead=[1])


def through_the_host(rank, world_size):
    from tp3.comm import device

    device._refusal = lambda host: "a test says so"
    sums = Sums(rank)
    for numel in SIZES:
        x = torch.empty(numel, dtype=torch.bfloat16, device="cuda")
        want = sums.fill(x, 3)
        dist.all_reduce(x)
        assert torch.equal(x.cpu(), want)
    parts = [torch.empty(r + 1, device="cuda") for r in range(world_size)]
    dist.all_gather(parts, torch.full((rank + 1,), float(rank), device="cuda"))
    assert all((part == r).all() for r, part in enumerate(parts))
    came = torch.empty(1000, device="cuda")
    sending = dist.isend(torch.full_like(came, float(rank)), (rank + 1) % world_size)
    dist.recv(came, (rank - 1) % world_size)
    sending.wait()
    assert (came == (rank - 1) % world_size).all()
    for dtype in (torch.float8_e4m3fn, torch.float8_e8m0fnu):
        sent = torch.arange(8, dtype=torch.uint8, device="cuda").view(dtype)
        came = torch.zeros_like(sent)
        sending = dist.isend(sent, (rank + 1) % world_size)
        dist.recv(came, (rank - 1) % world_size)
        sending.wait()
        assert came.view(torch.uint8).equal(sent.view(torch.uint8))
    assert all("through-host" in name for name in group().stats())


def test_ranks_that_share_no_memory_go_through_the_host():
    on_gpus(through_the_host)


def a_pair_with_wrong_data(rank, world_size):
    from tp3.comm.transport import probe

    right, records = probe.pattern, []
    if rank == 1:  # expects something else of rank 2, as if bytes had changed on the way
        probe.pattern = lambda sender, receiver: (
            right(sender, receiver) ^ (sender == 2 and receiver == 1)
        )
    handler = logging.Handler()
    handler.emit = records.append
    logging.getLogger("tp3.comm.device").addHandler(handler)
    x = torch.ones(4096, device="cuda")
    dist.all_reduce(x)
    assert (x == world_size).all()
    (record,) = records
    return record.getMessage()


def test_the_self_test_names_a_pair_and_all_ranks_fall_back():
    for text in on_gpus(a_pair_with_wrong_data):
        assert "data that rank 2 stores at rank 1 arrive wrong" in text


def a_self_test_that_hears_nothing(rank, world_size):
    """Rank 1 stores nothing at rank 2, as if its writes were lost."""
    from tp3.comm import device as device_side
    from tp3.comm.transport import device, probe

    device._TRIAL_SECONDS = 2.0  # read when a transport is made
    place = probe._place
    if rank == 1:

        class Silent(probe.PatternProbe):
            def __init__(self, transport, peer):
                probe._place = (lambda data: (0, 0)) if peer == 2 else place
                super().__init__(transport, peer)

        device_side.PatternProbe = Silent
    sums = Sums(rank)
    for numel in SIZES:
        x = torch.empty(numel, dtype=torch.bfloat16, device="cuda")
        want = sums.fill(x, 3)
        dist.all_reduce(x)
        assert torch.equal(x.cpu(), want)
    return group().stats()


def test_a_self_test_that_hears_nothing_leaves_the_group_usable():
    for stats in on_gpus(a_self_test_that_hears_nothing):
        assert all("through-host" in name for name in stats)


def a_compiler_that_fails(rank, world_size):
    from tp3.comm.transport import probe

    class NoCompiler(Exception):
        """Triton's errors are no RuntimeError either."""

    def fails(*args, **options):
        raise NoCompiler("no ptxas")

    if rank == 1:
        probe.exchange_table = fails
    x = torch.full((1000,), rank + 1.0, device="cuda")
    dist.all_reduce(x)
    assert (x == 6).all()
    return group().stats()


def test_a_compiler_that_fails_on_one_rank_leaves_the_group_usable():
    for stats in on_gpus(a_compiler_that_fails):
        assert all("through-host" in name for name in stats)
