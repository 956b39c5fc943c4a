"""A rank dies, stays away, leaves, aborts or is interrupted: the others learn it soon, by name."""

import re
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks.faults import (
    CALLS,
    LARGE,
    SOON,
    TIMEOUT,
    check_no_more,
    check_unusable,
    die,
    failing,
    in_round,
    names_left,
    new_group,
    ones,
    pids_of_all,
    resources,
)
from tests.ranks.reference import raises
from tp3.comm.errors import CollectiveTimeout, PeerDied, PeerFailed, R4DError
from tp3.comm.launch import launch

CULPRIT = 1
KILLS = [
    ("all_reduce", 16, 1),  # one-shot
    ("all_reduce", LARGE, 1),  # two-shot, before and after the parts are summed
    ("all_reduce", LARGE, 2),
    ("broadcast", LARGE, 1),
    ("broadcast", LARGE, 2),
    ("reduce", LARGE, 2),
    ("all_gather", LARGE, 1),  # while sizes are exchanged
    ("all_gather", LARGE, 3),
    ("reduce_scatter", LARGE, 2),
    ("all_to_all", LARGE, 2),
    ("gather", LARGE, 2),
    ("scatter", LARGE, 2),
    ("barrier", 0, 1),
]


def killed(rank, world_size, name, numel, number):
    pids = pids_of_all()
    before = resources()
    if rank == CULPRIT:
        in_round(number, die)
    seconds, error = failing(CALLS[name], numel, None)
    assert f"rank {CULPRIT} (pid {pids[CULPRIT]}) died" in str(error), error
    assert name in str(error), error
    assert seconds < SOON
    check_unusable()
    dist.destroy_process_group()
    check_no_more(before)
    return type(error), pids


@pytest.mark.parametrize(
    ("name", "numel", "number"), KILLS, ids=[f"{n}-{size}-round{i}" for n, size, i in KILLS]
)
def test_killed_inside(name, numel, number):
    results = launch(killed, 3, name, numel, number, timeout=TIMEOUT, expect_dead={CULPRIT})
    kinds = {result[0] for result in results if result}
    assert PeerDied in kinds
    assert kinds <= {PeerDied, PeerFailed}
    assert not names_left(results[0][1])


def killed_in_message(rank, world_size, way):
    """The culprit dies once a part of its message has moved."""
    pids = pids_of_all()
    message = torch.ones(LARGE)
    if rank == CULPRIT:
        for peer in (0, 2):
            (dist.irecv if way == "send" else dist.isend)(message, peer)
        dist.recv(torch.empty(1), 0, tag=1)
        die()
    if rank == 0:
        dist.isend(torch.ones(1), CULPRIT, tag=1)
    if way == "send":
        seconds, error = failing(lambda: [dist.send(ones(LARGE), CULPRIT) for _ in range(2)])
    else:
        source = CULPRIT if way == "recv" else None
        seconds, error = failing(lambda: [dist.recv(message, source) for _ in range(2)])
    assert f"rank {CULPRIT} (pid {pids[CULPRIT]}) died" in str(error), error
    assert way.partition(" ")[0] in str(error), error
    assert seconds < SOON


@pytest.mark.parametrize("way", ["send", "recv", "recv from any"])
def test_killed_inside_a_message(way):
    launch(killed_in_message, 3, way, timeout=TIMEOUT, expect_dead={CULPRIT})


def absent(rank, world_size):
    kinds = []
    for name, call in CALLS.items():
        group = new_group(0.3)
        if rank == CULPRIT:
            continue
        seconds, error = failing(call, 16, group)
        for words in (name, "(call 1, sequence ", "timeout of 0.3 s"):
            assert words in str(error), error
        # Another rank may be as late on a busy machine.
        assert re.search(r"rank\(s\) (0, )?1(, 2)? did not arrive", str(error)), error
        assert 0.2 < seconds < SOON
        check_unusable(group)
        kinds.append(type(error))
    group = new_group(0.3)
    if rank != CULPRIT:
        for source, words in ((CULPRIT, "from rank 1 (tag 5)"), (None, "from any rank (tag 5)")):
            error = failing(lambda s=source: dist.recv(ones(), s, group, tag=5))[1]
            assert words in str(error) or "unusable" in str(error), error
    dist.barrier()
    return kinds


def test_a_rank_that_never_calls_is_named():
    results = launch(absent, 3, timeout=TIMEOUT)
    for kinds in zip(results[0], results[2]):
        assert CollectiveTimeout in kinds
        assert set(kinds) <= {CollectiveTimeout, PeerFailed}  # whose time is up first tells


def leaving(rank, world_size):
    group = new_group()
    if rank == CULPRIT:
        dist.destroy_process_group(group)
        message = raises(R4DError, group.allreduce, [ones()])
        assert "destroyed" in message, message
        raises((ValueError, RuntimeError), dist.all_reduce, ones(), group=group)
    else:
        seconds, error = failing(CALLS["all_reduce"], 16, group)
        assert "rank 1 has destroyed the group" in str(error), error
        assert seconds < SOON
    dist.barrier()


def test_a_destroyed_group_is_unusable_and_releases_who_waits():
    launch(leaving, 3, timeout=TIMEOUT)


def aborting(rank, world_size):
    group = new_group()
    if rank == CULPRIT:
        group.abort()
    else:
        seconds, error = failing(CALLS["all_reduce"], 16, group, errors=PeerFailed)
        assert "rank 1 failed" in str(error), error
        assert "abort" in str(error), error
        assert seconds < SOON
    check_unusable(group)
    dist.barrier()


def test_abort_releases_the_peers():
    launch(aborting, 3, timeout=TIMEOUT)


def aborting_the_own_call(rank, world_size):
    group = new_group()
    if rank == CULPRIT:
        works = [dist.all_reduce(ones(), group=group, async_op=True) for _ in range(2)]
        works.append(dist.irecv(ones(), 0, group=group))
        group.abort()
        for work in works:
            assert failing(work.wait)[0] < SOON
        start = time.monotonic()
        dist.destroy_process_group(group)
        assert time.monotonic() - start < SOON
    dist.barrier()


def test_abort_releases_the_own_calls():
    launch(aborting_the_own_call, 3, timeout=TIMEOUT)


def interrupt():
    raise KeyboardInterrupt


def interrupted(rank, world_size, asynchronous):
    if rank == CULPRIT:
        in_round(2, interrupt)
        if asynchronous:
            work = dist.all_reduce(ones(LARGE), async_op=True)
            failing(work.wait, errors=KeyboardInterrupt)
        else:
            failing(CALLS["all_reduce"], LARGE, None, errors=KeyboardInterrupt)
    else:
        seconds, error = failing(CALLS["all_reduce"], LARGE, None, errors=PeerFailed)
        assert f"rank {CULPRIT} failed: KeyboardInterrupt" in str(error), error
        assert seconds < SOON
    check_unusable()


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_an_interrupted_rank_releases_the_others(asynchronous):
    launch(interrupted, 3, asynchronous, timeout=TIMEOUT)


def interrupted_while_waiting(rank, world_size):
    """A signal as the terminal sends it, while rank 2 stays away on purpose."""
    group = new_group()
    if rank == CULPRIT:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Timer(
            0.3, signal.pthread_kill, [threading.main_thread().ident, signal.SIGINT]
        ).start()
        failing(CALLS["all_reduce"], 16, group, errors=KeyboardInterrupt)
    elif rank == 0:
        seconds, error = failing(CALLS["all_reduce"], 16, group, errors=PeerFailed)
        assert "KeyboardInterrupt" in str(error), error
        assert seconds < SOON
    dist.barrier()
    if rank == 2:
        failing(CALLS["barrier"], 0, group)
    check_unusable(group)


def test_ctrl_c_while_waiting_releases_the_others():
    launch(interrupted_while_waiting, 3, timeout=TIMEOUT)
