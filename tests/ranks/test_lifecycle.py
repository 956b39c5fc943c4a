"""Groups are born by vote or not at all, and leave no file, descriptor, thread or mapping."""

import gc
import multiprocessing
import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks.faults import (
    SOON,
    TIMEOUT,
    check_no_more,
    failing,
    names_left,
    new_group,
    ones,
    resources,
)
from tests.ranks.reference import same
from tp3.comm.errors import R4DError
from tp3.comm.launch import launch
from tp3.comm.transport import segment

CULPRIT = 1
ROOT = Path(__file__).parents[2]


def use(group):
    """Everything that may start a thread or keep a view: sync, async, large, messages."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    data = ones(20_000)
    dist.all_reduce(data, group=group)
    dist.all_reduce(data, group=group, async_op=True).wait()
    work = dist.isend(ones(400_000), (rank + 1) % world_size, group=group)
    dist.recv(ones(400_000), (rank - 1) % world_size, group=group)
    work.wait()


def rounds(rank, world_size):
    gc.collect()
    gc.disable()  # nothing may depend on it
    for number in range(200):
        if number == 3:
            before = resources()
        group = new_group()
        if number % 10 == 0:
            use(group)
        else:
            dist.all_reduce(ones(), group=group)
        dist.destroy_process_group(group)
        del group
    check_no_more(before)
    return os.getpid()


def test_200_rounds_of_create_and_destroy_leave_nothing():
    assert not names_left(launch(rounds, 2, timeout=TIMEOUT))


def in_small_shm(code, size):
    """Run `code` where /dev/shm is a file system of `size`."""
    if os.geteuid() != 0:
        pytest.fail("mounting a small /dev/shm needs root: run this test as root, as CI does")
    shell = f'mount -t tmpfs -o size={size} tmpfs /dev/shm && exec "$0" -c "$1"'
    code = f"from tests.ranks.test_lifecycle import *\n{code}"
    command = ["unshare", "-m", "sh", "-c", shell, sys.executable, code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


def starting(rank, world_size, meeting):
    def start():
        dist.init_process_group(
            "r4d",
            init_method=f"file://{meeting}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=TIMEOUT),
        )

    seconds, error = failing(start)
    assert seconds < SOON
    return str(error)


def test_a_full_shm_is_an_error_on_every_rank_that_says_so(tmp_path):
    code = f"print(*launch(starting, 3, {str(tmp_path / 'meeting')!r}, init=False), sep='\\n')"
    errors = in_small_shm(code, "512k").splitlines()
    assert len(errors) == 3
    for error in errors:
        assert "rank 0 could not create the group" in error
        assert "/dev/shm is full" in error
        assert "enlarge it" in error


def move_64_mib(rank, world_size):
    numel = (64 << 20) // 4
    pattern = torch.arange(numel, dtype=torch.float32) % 1024
    data = pattern + rank
    dist.all_reduce(data)
    same("all_reduce", data, world_size * pattern + sum(range(world_size)))
    data = pattern + rank
    dist.broadcast(data, 1)
    same("broadcast", data, pattern + 1)
    out = torch.empty(numel)
    dist.all_to_all_single(out, pattern + rank)
    part = numel // world_size
    for peer in range(world_size):
        want = pattern[rank * part : (rank + 1) * part] + peer
        same(f"all_to_all from {peer}", out[peer * part : (peer + 1) * part], want)
    work = dist.isend(pattern + rank, (rank + 1) % world_size)
    dist.recv(out, (rank - 1) % world_size)
    work.wait()
    same("message", out, pattern + (rank - 1) % world_size)


def test_where_no_larger_slots_fit_the_small_ones_carry_large_messages():
    in_small_shm("launch(move_64_mib, 2)", "1m")


def test_64_mib_of_shm_are_enough_for_messages_of_64_mib():
    in_small_shm("launch(move_64_mib, 4)", "64m")


def failing_to_attach(rank, world_size, kind):
    def attach(*args, **kwargs):
        raise kind("no luck")

    if rank == CULPRIT:
        segment.attach = attach
    seconds, error = failing(new_group)
    assert f"rank {CULPRIT} could not create the group: {kind.__name__}: no luck" in str(error)
    assert seconds < SOON
    dist.all_reduce(ones())
    return os.getpid()


@pytest.mark.parametrize("kind", [OSError, RuntimeError, MemoryError, AssertionError])
def test_one_rank_that_fails_fails_all_with_its_reason(kind):
    assert not names_left(launch(failing_to_attach, 3, kind, timeout=TIMEOUT))


def with_setting(rank, world_size, name, values, words):
    os.environ[name] = values[rank]
    seconds, error = failing(new_group)
    for word in words:
        assert word in str(error), error
    assert seconds < SOON
    del os.environ[name]
    dist.all_reduce(ones(), group=new_group())


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("TP3_SHM_BYTES", ("65536", "131072", "65536"), ["TP3_SHM_BYTES", "65536", "131072"]),
        ("TP3_ALLREDUCE", ("auto", "two-shot", "auto"), ["TP3_ALLREDUCE", "'auto'", "'two-shot'"]),
        ("TP3_ALLREDUCE", ("auto", "ring", "auto"), ["TP3_ALLREDUCE is 'ring'", "one-shot"]),
        ("TP3_SHM_BYTES", ("65536", "4k", "65536"), ["TP3_SHM_BYTES is '4k'"]),
    ],
    ids=["shm-differs", "algorithm-differs", "algorithm-unknown", "shm-unreadable"],
)
def test_settings_that_differ_or_are_wrong_fail_all_ranks(name, values, words):
    launch(with_setting, 3, name, values, words, timeout=TIMEOUT)


def absent_at_creation(rank, world_size):
    if rank != CULPRIT:
        seconds, error = failing(lambda: dist.new_group(timeout=timedelta(seconds=1)))
        assert "[1] of 3 did not reach" in str(error), error
        assert seconds < SOON
    dist.barrier()


def test_a_rank_that_does_not_come_to_the_creation_is_named():
    launch(absent_at_creation, 3, timeout=TIMEOUT)


def child_of_a_rank(group):
    for call in (
        lambda: dist.all_reduce(ones()),
        lambda: dist.send(ones(), 0 if dist.get_rank() else 1),
        lambda: dist.barrier(group),
    ):
        assert "forked child" in str(failing(call)[1])
    group.abort()
    dist.destroy_process_group()


def forking(rank, world_size):
    group = new_group()
    use(group)
    if rank == CULPRIT:
        work = dist.all_reduce(ones(), group=group, async_op=True)  # its threads do not fork
        child = multiprocessing.get_context("fork").Process(target=child_of_a_rank, args=(group,))
        child.start()
        child.join(TIMEOUT)
        assert child.exitcode == 0
    else:
        time.sleep(0.2)
        work = dist.all_reduce(ones(), group=group, async_op=True)
    work.wait()
    use(group)
    use(None)


def test_a_forked_child_is_inert():
    launch(forking, 3, timeout=TIMEOUT)


def spawned(rank, world_size):
    data = torch.full((100_000,), rank + 1.0)
    dist.all_reduce(data)
    use(None)
    return data[-1].item()


def test_spawned_ranks():
    assert launch(spawned, 3, start="spawn", timeout=TIMEOUT) == [6.0] * 3


def closing_twice(rank, world_size):
    group = new_group()
    group.shutdown()
    group.shutdown()
    dist.destroy_process_group(group)
    failing(lambda: group.allreduce([ones()]), errors=R4DError)


def test_closing_is_idempotent():
    launch(closing_twice, 2, timeout=TIMEOUT)
