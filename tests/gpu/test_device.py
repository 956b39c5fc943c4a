"""r4d on the GPUs at hand: graphs, streams, messages, and the ways in which PyTorch is used.

Three ranks share the GPUs there are; without MPS their contexts take turns of some milliseconds.
The sums themselves are tested by `TP3_TEST_DEVICE=cuda pytest tests/ranks/test_exact.py` and its
neighbours.
"""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.gpu.ranks import MARKS, SIZES, Sums, group, on_gpus
from tp3.comm.errors import Disagreement, R4DError

pytestmark = MARKS


def graphs_and_eager_calls(rank, world_size):
    sums = Sums(rank)
    graphs = []
    for index, sizes in enumerate((SIZES[:3], SIZES[3:4], SIZES[1:4])):  # odd numbers of calls
        buffers = [torch.zeros(n, dtype=torch.bfloat16, device="cuda") for n in sizes]
        for x in buffers:
            dist.all_reduce(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for x in buffers:
                dist.all_reduce(x)
        graphs.append((graph, buffers, index))
    bad = 0
    for turn in range(20):
        for graph, buffers, index in graphs:
            wants = [sums.fill(x, turn * 100 + 7 * index + i) for i, x in enumerate(buffers)]
            if turn % world_size == rank:
                torch.cuda._sleep(2_000_000)  # about a millisecond late
            graph.replay()
            eager = torch.empty(SIZES[turn % len(SIZES)], dtype=torch.bfloat16, device="cuda")
            want = sums.fill(eager, turn)
            dist.all_reduce(eager)
            bad += not torch.equal(eager.cpu(), want)
            bad += sum(not torch.equal(x.cpu(), w) for x, w in zip(buffers, wants))
    assert bad == 0
    host = torch.full((SIZES[2],), 1.0, dtype=torch.bfloat16)  # as large as one on the device
    dist.all_reduce(host)
    assert (host == world_size).all()
    assert not any(name.endswith("through-host") for name in group().stats())


def test_graphs_replay_with_other_data_among_eager_calls():
    on_gpus(graphs_and_eager_calls)


def streams(rank, world_size):
    sums, works, checks = Sums(rank), [], []
    one, two = torch.cuda.Stream(), torch.cuda.Stream()
    for turn in range(30):
        x = torch.empty(SIZES[turn % len(SIZES)], dtype=torch.bfloat16, device="cuda")
        want = sums.fill(x, turn)
        stream = one if turn % 3 == 0 else two
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            if turn % 2:
                works.append(dist.all_reduce(x, async_op=True))
            else:
                dist.all_reduce(x)
        checks.append((x, want))
    for work in works:
        work.wait()
        work.synchronize()
        assert work.is_completed()
        assert work.is_success()
    torch.cuda.synchronize()
    assert all(torch.equal(x.cpu(), want) for x, want in checks)


def test_streams_and_asynchronous_calls_keep_their_order():
    on_gpus(streams)


def an_early_receive(rank, world_size):
    """Only the second time: a kernel that is loaded may have to wait for those that run."""
    for early in (False, True):
        for numel in (1000, 3_000_000):  # fits into the rings, does not
            came = torch.empty(numel, device="cuda")
            sent = torch.full((numel,), float(rank), device="cuda")
            x = torch.ones(4096, device="cuda")
            if early:
                receiving = dist.irecv(came, (rank - 1) % world_size)
            dist.all_reduce(x)
            sending = dist.isend(sent, (rank + 1) % world_size)
            if not early:
                receiving = dist.irecv(came, (rank - 1) % world_size)
            receiving.wait()
            sending.wait()
            assert (came == (rank - 1) % world_size).all()
            assert (x == world_size).all()


@pytest.mark.parametrize("loading", ["LAZY", "EAGER"])
def test_messages_overtake_collectives(loading):
    on_gpus(an_early_receive, env={"CUDA_MODULE_LOADING": loading})


def others_go_on(rank, world_size):
    """More streams than torch has: while a message waits, work on any of them goes on."""
    peer, came = 1 - rank, torch.empty(8, device="cuda")
    for turn in (0, 1):  # the kernels are loaded first
        if rank:
            receiving = dist.irecv(came, peer)
        for stream in [torch.cuda.Stream() for _ in range(40)]:
            with torch.cuda.stream(stream):
                y = torch.full_like(came, 3.0)
            stream.synchronize()
        if turn:
            dist.barrier()
        if rank:
            receiving.wait()
            assert (came == turn).all()
        else:
            dist.send(torch.full_like(came, float(turn)), peer)
    assert (y == 3).all()


def test_a_message_that_waits_holds_up_no_stream_of_torch():
    on_gpus(others_go_on, world_size=2, timeout=60)


def everything_on_the_gpu_by_default(rank, world_size):
    torch.set_default_device("cuda")
    x = torch.full((1000,), rank + 1.0)
    came = torch.empty(10)
    sending = dist.isend(torch.full((10,), float(rank)), (rank + 1) % world_size)
    dist.recv(came, (rank - 1) % world_size)
    sending.wait()
    dist.all_reduce(x)
    parts = [torch.empty(r + 1) for r in range(world_size)]  # by a table
    dist.all_gather(parts, torch.full((rank + 1,), float(rank)))
    assert (x == 6).all()
    assert (came == (rank - 1) % world_size).all()
    assert all((part == r).all() for r, part in enumerate(parts))
    assert not any(name.endswith("through-host") for name in group().stats())


def test_the_default_device_does_not_matter():
    on_gpus(everything_on_the_gpu_by_default)


def made_in_inference_mode(rank, world_size):
    """In two dimensions, unaligned and of odd size: through a padded copy."""
    with torch.inference_mode():
        x = torch.full((1, 5), rank + 1.0, device="cuda")
        came = torch.empty(world_size, 5, device="cuda")
    dist.all_reduce(x)
    assert (x == 6).all()
    with torch.inference_mode():
        x = torch.full((world_size, 5), rank + 1.0, device="cuda")
        out = torch.empty(1, 5, device="cuda")
    dist.reduce_scatter_tensor(out, x)
    assert (out == 6).all()
    dist.all_gather_into_tensor(came, out)
    assert (came == 6).all()


def test_what_inference_mode_made_may_be_written():
    on_gpus(made_in_inference_mode)


def differing_calls(rank, world_size):
    x = torch.ones(4096 if rank else 8192, device="cuda")
    with pytest.raises(Disagreement, match=r"float32\[8192\].*float32\[4096\]|4096.*8192"):
        dist.all_reduce(x)


def test_detail_compares_calls():
    on_gpus(differing_calls, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})


def sizes_that_differ(rank, world_size):
    x = torch.ones(1000 + rank, device="cuda")
    dist.all_reduce(torch.ones(8, device="cuda"))
    group().set_timeout(timedelta(seconds=5))
    dist.broadcast(x, 0)
    torch.cuda.synchronize()
    for _ in range(100):
        try:
            dist.all_reduce(torch.ones(8, device="cuda"))
        except R4DError as error:
            return str(error)
        time.sleep(0.1)
    return "no error"


def test_messages_of_other_sizes_are_refused_not_read():
    texts = on_gpus(sizes_that_differ)
    assert any("rank 0 sends 4000 bytes" in text and "expects 40" in text for text in texts)


def in_expandable_segments(rank, world_size):
    x = torch.ones(1 << 20, device="cuda")
    dist.all_reduce(x)
    assert (x == world_size).all()
    assert not any("through-host" in name for name in group().stats())


def test_expandable_segments_do_not_matter():
    conf = "expandable_segments:True"
    on_gpus(in_expandable_segments, env={"PYTORCH_CUDA_ALLOC_CONF": conf})


def first_in_inference_mode(rank, world_size):
    """The calls that make tables, buffers and events, and then more of them outside."""
    for mode in (True, False):
        with torch.inference_mode(mode):
            for number in range(20):
                mine = torch.full((300,), rank + number, device="cuda")
                parts = [torch.empty_like(mine) for _ in range(world_size)]
                dist.all_gather(parts, mine)
                dist.all_to_all(parts, [part.clone() for part in parts])
                dist.all_reduce(mine)
                assert [part.unique().tolist() for part in parts] == [[rank + number]] * world_size
                assert mine.unique().tolist() == [sum(range(world_size)) + world_size * number]


def test_what_inference_mode_made_serves_outside_of_it():
    on_gpus(first_in_inference_mode)


def another_device_is_current(rank, world_size):
    torch.cuda.set_device(0)
    device = torch.device("cuda", rank)
    for numel in SIZES:
        x = torch.full((numel,), rank + 1.0, device=device)
        dist.all_reduce(x)
        assert (x == 3).all()
        parts = [torch.empty(numel, device=device) for _ in range(world_size)]
        dist.all_gather(parts, torch.full((numel,), float(rank), device=device))
        assert all((part == r).all() for r, part in enumerate(parts))
        sending = dist.isend(parts[rank], 1 - rank)
        dist.recv(x, 1 - rank)
        sending.wait()
        assert (x == 1 - rank).all()
    dist.barrier()
    assert torch.cuda.current_device() == 0


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_may_lie_on_another_device_than_the_current_one():
    on_gpus(another_device_is_current, world_size=2)
