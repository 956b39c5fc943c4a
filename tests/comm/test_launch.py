"""`launch` is what the other tests stand on: results in order, the right culprit, nothing left."""

import multiprocessing
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tp3.comm import launch as launch_module
from tp3.comm.launch import RankFailure, launch

GLOO = {"GLOO_SOCKET_IFNAME": "lo"}


@pytest.fixture(autouse=True)
def nothing_left_behind():
    before = multiprocessing.active_children()  # tests/kernels keeps one for its whole session
    yield
    assert [child for child in multiprocessing.active_children() if child not in before] == []


def summed(rank, world_size, addend):
    tensor = torch.tensor([rank + addend])
    dist.all_reduce(tensor)
    return rank, tensor


def identity(rank, world_size):
    return rank, world_size, dist.is_initialized(), torch.get_num_threads()


def environment(rank, world_size):
    return [os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TP3_HELLO")]


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_results_in_rank_order(start):
    results = launch(summed, 3, 10, backend="gloo", start=start, env=GLOO)
    assert [rank for rank, _ in results] == [0, 1, 2]
    assert all(tensor.tolist() == [33] for _, tensor in results)


def test_one_rank_without_group():
    assert launch(identity, 1, init=False) == [(0, 1, False, 1)]


def test_environment_is_the_ranks_only():
    before = dict(os.environ)
    results = launch(environment, 2, init=False, env={"TP3_HELLO": "there"})
    assert results == [["0", "0", "2", "there"], ["1", "1", "2", "there"]]
    assert dict(os.environ) == before


def test_large_results_pass():
    results = launch(lambda rank, _: torch.full((1 << 20,), rank), 2, init=False)
    assert [int(tensor.sum()) for tensor in results] == [0, 1 << 20]


def fail_late(rank, world_size, culprit):
    if rank != culprit:
        time.sleep(0.5)
    raise KeyError(f"from {rank}")


def test_first_failure_wins():
    with pytest.raises(RankFailure, match=r"(?s)^rank 1 raised:.*KeyError: 'from 1'") as caught:
        launch(fail_late, 3, 1, init=False)
    assert caught.value.rank == 1
    assert "then rank 0: KeyError: 'from 0'" in str(caught.value)


def die(rank, world_size, culprit, number):
    if rank == culprit:
        os.kill(os.getpid(), number)
    dist.barrier()


def test_dead_rank_is_the_culprit_and_not_its_peers():
    with pytest.raises(RankFailure, match=r"^rank 2 was killed by signal 9 \(SIGKILL\)"):
        launch(die, 3, 2, signal.SIGKILL, backend="gloo", env=GLOO)


def test_exit_without_result():
    with pytest.raises(RankFailure, match=r"^rank 0 exited with code 3 and no result"):
        launch(lambda rank, _: os._exit(3), 1, init=False)


def survive(rank, world_size):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return rank


def test_expected_death():
    assert launch(survive, 3, init=False, expect_dead={1}) == [0, None, 2]
    with pytest.raises(RankFailure, match=r"^rank 0 returned, but was expected to die"):
        launch(survive, 3, init=False, expect_dead={0, 1})


def hang(rank, world_size, hanging):
    if rank in hanging:
        time.sleep(600)
    elif rank == 0:
        raise ValueError("unlucky")


def test_others_are_killed_after_the_grace(monkeypatch):
    monkeypatch.setattr(launch_module, "GRACE_S", 0.5)
    started = time.monotonic()
    with pytest.raises(RankFailure, match=r"(?s)unlucky.*still running 0.5 s later: 1, 2"):
        launch(hang, 3, {1, 2}, init=False)
    assert time.monotonic() - started < 5


def test_deadline_names_the_unfinished_and_where_they_are(monkeypatch):
    monkeypatch.setattr(launch_module, "STARTUP_S", 0.5)
    expected = r"(?s)^rank 0 did not finish in 1 s \(all unfinished: 0, 1\).*rank 1:.*in hang"
    with pytest.raises(RankFailure, match=expected):
        launch(hang, 3, {0, 1}, init=False, timeout=0.5)


def test_death_at_exit_is_a_failure(monkeypatch):
    monkeypatch.setattr(launch_module.pickle, "dumps", die_after(launch_module.pickle.dumps))
    with pytest.raises(RankFailure, match=r"^rank 0 returned, then was killed by signal 9"):
        launch(identity, 1, init=False)


def die_after(dumps):
    def patched(outcome):
        multiprocessing.util.Finalize(None, os.kill, (os.getpid(), signal.SIGKILL), exitpriority=0)
        return dumps(outcome)

    return patched


def test_bad_input():
    with pytest.raises(ValueError, match="world_size is 0; it must be at least 1"):
        launch(identity, 0)
    with pytest.raises(ValueError, match="start is 'thread'; it must be 'fork' or 'spawn'"):
        launch(identity, 1, start="thread")
