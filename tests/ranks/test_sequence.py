"""Rounds, slots and the counter: calls of changing size, ranks late on purpose, the wrap."""

import time

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.ranks.reference import poisoned, same, tensor
from tests.ranks.test_exact import LARGE, expected, inputs_of
from tp3.comm.launch import launch
from tp3.comm.layout import SEQUENCE_MASK
from tp3.comm.transport import host

SHM_BYTES = 256 << 10  # slots of 36 KiB at W=3
# fp32 elements: two-shot begins at 32 KiB, then one, two and three pieces end
EDGES = [1, 8192, 9216, 18432, 27648]
F32 = torch.float32


def sizes(rng, count):
    """Every other one beside an edge, the others of every magnitude."""
    for call in range(count):
        if call % 2:
            yield max(0, int(rng.choice(EDGES) + rng.integers(-3, 4)))
        else:
            yield int(2 ** rng.uniform(0, 15))


def interleaved(rank, world_size, late):
    arrays = inputs_of("spread", F32, world_size)
    want = expected("spread", F32, world_size)
    rng, delays = np.random.default_rng(11), np.random.default_rng(12)
    for call, size in enumerate(sizes(np.random.default_rng(10), 1000)):
        start = int(rng.integers(0, LARGE - 40_000))
        mine = tensor(arrays[rank][start : start + size], F32)
        total = tensor(want[start : start + size], F32)
        if rank == late and delays.random() < 0.1:
            time.sleep(delays.uniform(0, 3e-3))
        root, form = call % world_size, call % 7
        if form == 0:
            dist.all_reduce(mine, async_op=True).wait()
            same(f"call {call}, asynchronous", mine, total)
        elif form == 1:
            dist.reduce(mine, root)
            if rank == root:
                same(f"call {call}, reduce", mine, total)
        elif form == 2:
            out = poisoned(total.tensor_split(world_size)[rank].shape, F32)
            dist.reduce_scatter(out, list(mine.tensor_split(world_size)))
            same(f"call {call}, reduce_scatter", out, total.tensor_split(world_size)[rank])
        elif form == 3:
            dist.broadcast(mine, root)
            same(f"call {call}, broadcast", mine, arrays[root][start : start + size])
        else:
            dist.all_reduce(mine)
            same(f"call {call}", mine, total)


@pytest.mark.parametrize("late", [0, 2])
def test_mixed_sizes_interleaved_1000_times_with_a_late_rank(late):
    expected("spread", F32, 3)
    launch(interleaved, 3, late, env={"TP3_SHM_BYTES": str(SHM_BYTES)})


def across_the_wrap(rank, world_size, presets):
    arrays = inputs_of("spread", F32, world_size)
    want = expected("spread", F32, world_size)
    for preset in presets:
        host.FIRST_SEQUENCE = preset
        group = dist.new_group()
        for call in range(20):
            size = (1, 20_000, 300_000, 0)[call % 4]
            if rank == call % world_size:
                time.sleep(1e-3)
            data = tensor(arrays[rank][call : call + size], F32)
            dist.all_reduce(data, group=group)
            same(f"call {call} from {preset:#x}", data, want[call : call + size])
        dist.destroy_process_group(group)


EDGES_OF_THE_COUNTER = [
    *(SEQUENCE_MASK + 1 - before for before in (1, 2, 3, 4, 5, 8, 9, 30)),
    0,
    0x7FFF_FFFF,
    0x8000_0000,
    0x8000_0001,
]


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_sequence_wraps(world_size):
    expected("spread", F32, world_size)
    launch(across_the_wrap, world_size, EDGES_OF_THE_COUNTER)


def default_start(rank, world_size):
    """Without a preset the counter wraps after 256 rounds."""
    rounds, publish = [], host.HostTransport.sync

    def counting(self):
        publish(self)
        rounds.append(int(self._sequence))

    host.HostTransport.sync = counting
    group = dist.new_group()
    for call in range(300):
        data = torch.full((3,), float(call + rank))
        dist.all_reduce(data, group=group)
        assert data[2].item() == world_size * call + sum(range(world_size))
    assert rounds[:2] == [host.FIRST_SEQUENCE + 1, host.FIRST_SEQUENCE + 2]
    assert rounds[255:258] == [SEQUENCE_MASK, 0, 1]


def test_every_run_wraps_soon():
    launch(default_start, 3)
