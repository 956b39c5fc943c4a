"""Each guard twice: it holds under a skew made on purpose, and switched off the same check fails.

The second run is the proof that the first can see anything.
"""

import multiprocessing
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks.faults import (
    CALLS,
    SOON,
    TIMEOUT,
    die,
    failing,
    in_round,
    names_left,
    new_group,
    ones,
    pids_of_all,
)
from tp3.comm.errors import Disagreement, PeerDied, R4DError
from tp3.comm.launch import launch
from tp3.comm.reduce import Reduction
from tp3.comm.transport import bootstrap, host, liveness, segment

SKEW = 0.02
both = pytest.mark.parametrize("guarded", [True, False], ids=["guarded", "switched-off"])


def wrong_sums(rank, world_size, group=None):
    """How many of some sums, whose data change from call to call, are not right."""
    wrong = 0
    for call in range(8):
        data = torch.full((1000,), 10.0 * call + rank)
        dist.all_reduce(data, group=group)
        wrong += not (data == 10 * call * world_size + sum(range(world_size))).all()
    return wrong


def slow_reader(rank, world_size, guarded):
    if rank == 2:
        combine = Reduction.combine

        def slow(self, parts, out):
            time.sleep(SKEW)
            combine(self, parts, out)

        Reduction.combine = slow
    if not guarded:
        enter = host.HostTransport.next_round
        host.HostTransport.next_round = lambda self: 0 * enter(self)
    return wrong_sums(rank, world_size)


@both
def test_one_slot_in_place_of_two(guarded):
    """tokenspeed#1356: a fast rank overwrites what a slow one still reads; just wrong numbers."""
    wrong = launch(slow_reader, 3, guarded, timeout=TIMEOUT)
    assert (wrong == [0, 0, 0]) if guarded else wrong[2] > 0


def slow_writer(rank, world_size, guarded):
    if rank == 1:
        enter = host.HostTransport.next_round

        def early(self):
            parity = enter(self)
            if not guarded:
                start = self.layout.flag(self.rank)
                self._view[start : start + 4] = self._sequence.to_bytes(4, "little")
            time.sleep(SKEW)
            return parity

        host.HostTransport.next_round = early
    return wrong_sums(rank, world_size)


@both
def test_a_flag_before_its_payload(guarded):
    """iris#296: the flag is seen before the payload."""
    wrong = launch(slow_writer, 3, guarded, timeout=TIMEOUT)
    assert (wrong == [0, 0, 0]) if guarded else (wrong[0] and wrong[2])


def late_rank(rank, world_size, guarded):
    if not guarded:
        host.HostTransport._wait = lambda self, line, sequence: None
        host.HostTransport._compare = lambda self, parity: None
    dist.all_reduce(ones())  # all are here
    group = dist.group.WORLD
    if rank == 1:
        time.sleep(0.1)
    return wrong_sums(rank, world_size, group)


@both
def test_a_wait_that_does_not_wait(guarded):
    """vllm#2760, #2788: garbage from flags that race."""
    wrong = launch(late_rank, 3, guarded, timeout=TIMEOUT)
    assert (wrong == [0, 0, 0]) if guarded else (wrong[0] and wrong[2])


def waiting(rank, world_size, guarded):
    if rank == 1:
        time.sleep(1.5)
    elif not guarded:
        time.sleep = lambda seconds: None
    used = time.process_time()
    dist.barrier()
    return time.process_time() - used


@both
def test_a_long_wait_sleeps(guarded):
    """llama-cpp-rdna-boosts#6: an unbounded spin takes the machine down."""
    assert (launch(waiting, 2, guarded, timeout=TIMEOUT)[0] < 0.3) == guarded


def different_dtypes(rank, world_size, guarded):
    group = new_group()
    if not guarded:
        host.HostTransport._compare = lambda self, parity: None
    data = ones(4) if rank else torch.ones(4, dtype=torch.int32)
    if guarded:
        failing(lambda: dist.all_reduce(data, group=group), errors=Disagreement)
    else:
        dist.all_reduce(data, group=group)
        assert data.tolist() != [world_size] * 4


@both
def test_calls_that_differ_are_compared(guarded):
    """nccl#1417, pytorch#150248: hangs or garbage."""
    launch(different_dtypes, 3, guarded, timeout=TIMEOUT)


def dead_peer(rank, world_size, guarded):
    if not guarded:
        liveness.ProcessHandle.alive = lambda self: True
    group = new_group(TIMEOUT if guarded else 1.5)
    if rank == 1:
        in_round(1, die)
    seconds, error = failing(CALLS["barrier"], 0, group)
    assert ("(pid" in str(error) and "died" in str(error)) == guarded, error
    assert ("did not arrive" in str(error)) != guarded, error
    assert seconds < SOON if guarded else seconds > 1


@both
def test_dead_peers_are_looked_for(guarded):
    """vllm#8410: one rank is gone and the others hang."""
    launch(dead_peer, 3, guarded, timeout=TIMEOUT, expect_dead={1})


def other_namespaces(rank, world_size, guarded):
    """As in containers: pids that mean nothing here."""

    class Foreign(liveness.ProcessHandle):
        @classmethod
        def own(cls):
            return cls(pid=(1 << 22) + 1 + rank, start=0)

    bootstrap.ProcessHandle = Foreign
    bootstrap.pid_namespace = lambda: f"pid:[{rank if guarded else 1}]"
    group = new_group()
    if rank == 1:
        time.sleep(1)
    if guarded or rank == 1:
        try:
            return wrong_sums(rank, world_size, group)
        except R4DError:
            assert not guarded
            return -1
    return type(failing(dist.barrier, group)[1])


@both
def test_peers_in_other_pid_namespaces(guarded):
    """rocm-aic#88, vllm#55906, nccl#360: containers share memory but not pids."""
    results = launch(other_namespaces, 3, guarded, timeout=TIMEOUT)
    assert (results == [0, 0, 0]) if guarded else (PeerDied in results)


def named_segments(rank, world_size, guarded):
    pids = pids_of_all()
    if rank == 0:
        child = multiprocessing.get_context("fork").Process(target=make_and_die)
        child.start()
        child.join()
        assert child.exitcode < 0
        pids.append(child.pid)
        segment.create(4096)  # this one's maker lives
    if not guarded:
        segment.unlink = lambda name: None
    groups = [new_group(), new_group()]
    wrong = [wrong_sums(rank, world_size, group) for group in groups]
    dist.barrier()
    left = names_left(pids)
    dist.barrier()
    if rank == 0:
        for path in left:
            path.unlink()
    return wrong, len(left)


def make_and_die():
    segment.create(4096)
    die()


@both
def test_names_are_unlinked(guarded):
    """vllm#46716, #34169: names shared between jobs, or left behind, are met again."""
    for wrong, left in launch(named_segments, 3, guarded, timeout=TIMEOUT):
        assert wrong == [0, 0]
        assert left == (1 if guarded else 3)
