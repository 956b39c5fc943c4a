"""What the tests of faults share: calls, ways to break them, and what must be left afterwards."""

import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tp3.comm.errors import R4DError
from tp3.comm.transport import host

TIMEOUT = 20.0
SOON = 6.0  # a fault is noticed within about a second; the machine may be busy
LARGE = 600_000  # several rounds of everything, more than a ring holds


def ones(numel=16):
    return torch.ones(numel)


def many(numel=16):
    return [ones(numel) for _ in range(3)]


def only(rank, numel):
    return many(numel) if dist.get_rank() == rank else None


# name: call of `numel` elements in a group of three
CALLS = {
    "all_reduce": lambda numel, group: dist.all_reduce(ones(numel), group=group),
    "broadcast": lambda numel, group: dist.broadcast(ones(numel), 0, group=group),
    "reduce": lambda numel, group: dist.reduce(ones(numel), 0, group=group),
    "all_gather": lambda numel, group: dist.all_gather(many(numel), ones(numel), group=group),
    "reduce_scatter": lambda numel, group: dist.reduce_scatter(
        ones(numel), many(numel), group=group
    ),
    "all_to_all": lambda numel, group: dist.all_to_all(many(numel), many(numel), group=group),
    "gather": lambda numel, group: dist.gather(ones(numel), only(0, numel), 0, group=group),
    "scatter": lambda numel, group: dist.scatter(ones(numel), only(0, numel), 0, group=group),
    "barrier": lambda numel, group: dist.barrier(group=group),
}


def new_group(seconds=TIMEOUT):
    """A group of all ranks, made without haste, that waits for `seconds` afterwards."""
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT))
    group.set_timeout(timedelta(seconds=seconds))
    return group


def in_round(number, action):
    """From now on, call `action` before this process publishes its `number`-th round."""
    sync, left = host.HostTransport.sync, [number]

    def interrupted(self):
        left[0] -= 1
        if not left[0]:
            action()
        sync(self)

    host.HostTransport.sync = interrupted


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def pids_of_all():
    pids = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    return pids


def failing(function, *args, errors=R4DError):
    """How long `function` took to raise, and the error."""
    start = time.monotonic()
    try:
        function(*args)
    except errors as error:
        return time.monotonic() - start, error
    raise AssertionError(f"{function} did not raise")


def check_unusable(group=None):
    """The group says at once that it is unusable."""
    seconds, error = failing(CALLS["all_reduce"], 16, group)
    assert "unusable" in str(error), error
    assert seconds < 2


def resources():
    """Descriptors, threads and mapped segments of this process."""
    maps = Path("/proc/self/maps").read_text()
    return len(os.listdir("/proc/self/fd")), threading.active_count(), maps.count("/dev/shm/tp3-")


def check_no_more(before):
    after = resources()
    assert all(a <= b for a, b in zip(after, before)), (
        f"descriptors, threads, segments: {before} before, {after} after"
    )


def names_left(pids):
    """Files in /dev/shm that these processes have left."""
    return [path for pid in pids for path in Path("/dev/shm").glob(f"tp3-*-{pid}-*")]
