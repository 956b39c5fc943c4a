"""r4d's device half without a GPU (``device``): how two ranks connect, call, fail and end.

Two, for the kernels of one rank cannot wait beside each other here, as self-tests of pairs do.
"""

import os
import signal
from contextlib import suppress

import pytest
import torch

from tests.kernels import interpreted
from tests.kernels.device import Emulated, Runtime
from tests.kernels.interpreted import layout_of
from tp3.comm.collectives import device as moves
from tp3.comm.errors import R4DError
from tp3.comm.reduce import reduction_of

W = 2


def emulated(rank, world_size, layout, folder, expect_dead, function, *args):
    result = function(Emulated(folder, rank, world_size), *args)
    if not expect_dead:  # a process that has ended is a dead peer to one that still waits
        interpreted.meet(folder, rank, world_size, "end")
    return result


@pytest.fixture
def ranks(interpreter, tmp_path):
    def run(function, *args, expect_dead=()):
        given = layout_of(W), tmp_path, expect_dead, function, *args
        return interpreter.ranks(emulated, *given, expect_dead=expect_dead)

    return run


def summed(emulated):
    """By every kernel."""
    for algorithm in (moves.sentinel, moves.one_shot, moves.two_shot):
        x = torch.full((700,), emulated.rank + 1.0)
        emulated.side.queue.submit(
            lambda run=algorithm, x=x: run(
                emulated.side.transport, x, reduction_of("SUM", torch.float32)
            ),
            [x],
            sync=True,
        )
        assert (x == 3).all()
    emulated.side.check()


def exchanged(emulated):
    came, sent = torch.full((100,), -1.0), torch.full((100,), float(emulated.rank))
    sending = emulated.side.send(sent.view(torch.uint8), emulated.peer, 0)
    receiving = emulated.side.recv(came, came.view(torch.uint8), emulated.peer, 0)
    sending.wait()
    receiving.wait()
    assert (came == emulated.peer).all()


def calls_and_messages(emulated, first):
    for kind in (first, "call", "message", "call"):
        if kind == "call":
            assert emulated.side.reachable()
            summed(emulated)
        else:
            exchanged(emulated)
    assert emulated.side.transport.connected == [emulated.peer]
    emulated.close()


@pytest.mark.parametrize("first", ["call", "message"])
def test_ranks_connect_call_and_let_everything_go(ranks, first):
    ranks(calls_and_messages, first)


def lost_writes(emulated):
    """What rank 1 stores at rank 0 is lost."""
    from tp3.comm import device as sides
    from tp3.comm.transport import device, probe

    device._TRIAL_SECONDS = 0.05
    interpreted.TURN_SECONDS = 0.02
    if emulated.rank == 1:

        class Silent(probe.PatternProbe):
            def __init__(self, transport, peer):
                probe._place = lambda data: (0, 0)
                super().__init__(transport, peer)

            def fault(self):
                return ""

        sides.PatternProbe = Silent
    assert not emulated.side.reachable()
    emulated.side.check()
    assert emulated.group.transport.failure is None
    return emulated.side.problem


def test_a_self_test_that_hears_nothing_leaves_the_group_usable(ranks):
    for problem in ranks(lost_writes):
        assert "timeout of 0.05 s on rank 0: rank(s) 1 did not arrive" in problem


def changed_pattern(emulated):
    """Rank 0 expects something else of rank 1."""
    from tp3.comm.transport import probe

    right = probe.pattern
    if emulated.rank == 0:
        probe.pattern = lambda sender, receiver: right(sender, receiver) ^ (sender == 1)


def changed_writes(emulated):
    changed_pattern(emulated)
    assert not emulated.side.reachable()
    emulated.side.check()
    return emulated.side.problem


def test_a_self_test_that_finds_other_bytes_names_the_pair(ranks):
    for problem in ranks(changed_writes):
        assert "data that rank 1 stores at rank 0 arrive wrong" in problem


def no_memory(emulated):
    if emulated.rank == 1:

        def refuses(self, nbytes, *, uncached=False):
            raise R4DError("r4d: cudaMalloc failed: cudaErrorMemoryAllocation (2)")

        Runtime.malloc = refuses
    assert emulated.side.send(torch.ones(8), emulated.peer, 0) is None
    assert not emulated.side.reachable()
    return emulated.side.problem


def test_a_rank_without_memory_is_named(ranks):
    for problem in ranks(no_memory):
        assert "rank 1 cannot share device memory: cudaMalloc failed" in problem


def no_transport(emulated, first):
    """The second time rank 1 could make one."""
    from tp3.comm import device

    if emulated.rank == 1:
        right = device.DeviceTransport

        def breaks(*args):
            device.DeviceTransport = right
            raise MemoryError("no pinned memory")

        device.DeviceTransport = breaks
    for kind in (first, "call", "message"):
        if kind == "call":
            assert not emulated.side.reachable()
        else:
            assert emulated.side.send(torch.ones(8), emulated.peer, 0) is None
    emulated.group.close()
    return emulated.side.problem


@pytest.mark.parametrize("first", ["call", "message"])
def test_a_transport_that_cannot_be_made_keeps_nobody_waiting(ranks, first):
    for problem in ranks(no_transport, first):
        assert "no pinned memory" in problem


def leaves(emulated):
    """Rank 1 has shared nothing; rank 0 has memory and goes on, with whomever it may be."""
    if emulated.rank == 1:
        emulated.group.close()
        (emulated.folder / "left").touch()
        return
    emulated.side._connect([])
    interpreted.until(lambda: (emulated.folder / "left").exists())
    emulated.side.transport.look()
    emulated.side.check()
    with pytest.raises(R4DError, match="rank 1 has destroyed the group"):
        emulated.side.reachable()


def test_a_rank_that_leaves_ends_no_calls_but_those_that_wait_for_it(ranks):
    ranks(leaves)


def dies(emulated, when):
    """Rank 1, before it connects or before it votes."""
    from tp3.comm.device import DeviceSide

    if when == "after a failed self-test":
        changed_pattern(emulated)
    connects = DeviceSide._connect_all

    def killed(side):
        if when != "before":
            with suppress(R4DError):
                connects(side)
        os.kill(os.getpid(), signal.SIGKILL)

    if emulated.rank == 1:
        DeviceSide._connect_all = killed
    with pytest.raises(R4DError, match=r"rank 1 \(pid \d+\) died"):
        emulated.side.reachable()


@pytest.mark.parametrize("when", ["before", "after", "after a failed self-test"])
def test_a_rank_that_dies_while_ranks_connect_is_named(ranks, when):
    ranks(dies, when, expect_dead=[1])
