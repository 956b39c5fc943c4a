"""r4d on the GPUs at hand: graphs, streams, failures, and what is left afterwards.

Three ranks share the GPUs there are; without MPS their contexts take turns of some milliseconds.
The sums themselves are tested by `TP3_TEST_DEVICE=cuda pytest tests/ranks/test_exact.py` and its
neighbours.
"""

import logging
import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.ranks.test_exact import expected, inputs_of
from tp3.comm.errors import CollectiveTimeout, Disagreement, R4DError
from tp3.comm.launch import launch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a GPU"),
    pytest.mark.timeout(300),
]
W = 3
SIZES = [8, 1000, 4096, 131_072, 1_000_000]  # sentinel, one-shot and two-shot; two are unaligned
SOON = 8.0


def on_gpus(function, *args, world_size=W, **options):
    return launch(function, world_size, *args, device="cuda", start="spawn", **options)


def group():
    return dist.group.WORLD.group


class Sums:
    """All-reduces of seeded bf16 data whose canonical sum is known."""

    def __init__(self, rank):
        self.inputs = inputs_of("cancelling", torch.bfloat16, W)
        self.total = expected("cancelling", torch.bfloat16, W)
        self.rank = rank

    def fill(self, x, start):
        """Put other data into x; what they will sum to."""
        rows = slice(start, start + x.numel())
        x.copy_(torch.from_numpy(self.inputs[self.rank][rows]))
        return torch.from_numpy(self.total[rows]).to(torch.bfloat16)


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
