"""How many blocks a launch may have, by the GPUs of all ranks."""

from itertools import product

import pytest

from tp3.comm.errors import R4DError
from tp3.comm.transport.co_residency import room_for

H200 = 132
SENTINEL, COPY = (256, 64), (256, 128)  # threads, registers of a thread


def gpus(*sharing, multiprocessors=H200):
    return [(f"GPU-{i}", multiprocessors) for i, ranks in enumerate(sharing) for _ in range(ranks)]


def test_a_gpu_of_ones_own_holds_what_its_registers_hold():
    room = room_for(gpus(1, 1, 1))
    assert (room.blocks(*SENTINEL), room.blocks(*COPY)) == (4 * H200, 2 * H200)
    smaller = [*gpus(1, 1), ("small", 28)]
    assert room_for(smaller).blocks(*SENTINEL) == 4 * 28


@pytest.mark.parametrize("shape", [SENTINEL, COPY])
def test_three_ranks_of_one_gpu_leave_half_of_it_while_two_wait(shape):
    assert room_for(gpus(3)).blocks(*shape) == 33


def test_the_most_crowded_gpu_decides():
    assert room_for(gpus(2, 1)).blocks(*SENTINEL) == 66
    assert room_for(gpus(3, 4)).blocks(*SENTINEL) == 22


def test_whoever_waits_leaves_multiprocessors_to_the_last_rank_and_has_a_block_for_every_lane():
    refused = set()
    for multiprocessors, ranks in product((16, 28, 64, H200), range(2, 17)):
        try:
            blocks = room_for(gpus(ranks, multiprocessors=multiprocessors)).blocks(*COPY)
        except R4DError:
            refused.add((multiprocessors, ranks))
            continue
        assert blocks >= 2 * ranks
        assert (ranks - 1) * blocks < multiprocessors
        assert blocks == 2 * ranks or (ranks - 1) * blocks <= multiprocessors / 2
    assert {ranks for number, ranks in refused if number == H200} == set(range(9, 17))
    assert {ranks for number, ranks in refused if number == 28} == set(range(5, 17))


def test_too_many_ranks_are_told_so():
    with pytest.raises(R4DError, match=r"9 of 9 ranks share a GPU of 132 multiprocessors.*fewer"):
        room_for(gpus(9))
