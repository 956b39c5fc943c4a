"""How pairs of ranks connect: ranks are threads; a probe ends once both of its ends began it."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from tp3.comm.errors import PeerDied, R4DError
from tp3.comm.transport.bootstrap import Meeting
from tp3.comm.transport.pairs import Pairs

PATIENCE, PROBE_SECONDS = 20.0, 4.0


class World:
    """The store, and which probes have begun: [(rank, peer)]."""

    def __init__(self, world_size, timeout=PATIENCE):
        self.store, self.world_size, self.timeout = dist.HashStore(), world_size, timeout
        self.began = []
        self.unmappable, self.refused, self.changed = set(), set(), set()
        self.slow = {}  # (rank, peer): seconds before the probe begins

    def run(self, *plans):
        """What each rank's plan, a function of its Rank, returns or raises."""

        def call(rank, plan):
            try:
                return plan(Rank(self, rank))
            except R4DError as error:
                return error

        with ThreadPoolExecutor(len(plans)) as pool:
            return list(pool.map(call, range(len(plans)), plans))


class Rank:
    def __init__(self, world, rank):
        self.world, self.rank = world, rank
        self.dead = threading.Event()
        timeout = timedelta(seconds=world.timeout)
        self.meeting = Meeting(
            store=world.store,
            rank=rank,
            world_size=world.world_size,
            timeout=timeout,
            check=self.check,
        )
        self.mapped, self.wrong = [], ""
        self.pairs = Pairs(self.meeting, self, lambda: self.wrong)
        world.store.set(f"device/offer/{rank}", f"of {rank}")

    def connect(self, *ranks):
        self.pairs.connect(ranks, lambda peer: Probe(self.world, self.rank, peer))

    def sees(self, key):
        """Wait for what another rank says."""
        self.world.store.wait([f"device/{key}"], timedelta(seconds=PATIENCE))

    def check(self):
        if self.dead.is_set():
            raise PeerDied("r4d: it died")

    def refusal(self, peer, text):
        assert text == f"of {peer}"
        return "two makers" if {self.rank, peer} in self.world.refused else ""

    def map(self, peer):
        if (self.rank, peer) in self.world.unmappable:
            raise R4DError("r4d: no peer access")
        self.mapped.append(peer)


class Probe:
    def __init__(self, world, rank, peer):
        self.world, self.rank, self.peer = world, rank, peer
        assert (rank, peer) not in world.began
        time.sleep(world.slow.get((rank, peer), 0))
        world.began.append((rank, peer))
        self.limit = time.monotonic() + PROBE_SECONDS

    def met(self):
        return (self.peer, self.rank) in self.world.began

    def ended(self):
        return self.met() or time.monotonic() > self.limit

    def fault(self):
        if not self.met():
            return "nothing came"
        return "wrong bytes" if (self.peer, self.rank) in self.world.changed else ""


def ring(step):
    def plan(rank):
        size = rank.world.world_size
        for peer in ((rank.rank + step) % size, (rank.rank - step) % size):
            rank.connect(peer)
        return rank.pairs.connected

    return plan


@pytest.mark.parametrize("world_size", [2, 3, 4, 7])
@pytest.mark.parametrize("step", [1, -1])
def test_a_ring_of_first_messages_connects(world_size, step):
    found = World(world_size).run(*[ring(step)] * world_size)
    neighbours = [{(r - 1) % world_size, (r + 1) % world_size} for r in range(world_size)]
    assert all(set(connected) >= pairs for connected, pairs in zip(found, neighbours))


def test_all_at_once_and_one_after_another_meet():
    def everybody(rank):
        rank.connect(*(r for r in range(5) if r != rank.rank))
        return rank.pairs.connected

    def slowly(rank):
        for peer in sorted({0, 1, 2, 3, 4} - {rank.rank}, reverse=rank.rank % 2 == 0):
            rank.connect(peer)
        return rank.pairs.connected

    found = World(5).run(everybody, slowly, slowly, everybody, slowly)
    assert found == [[r for r in range(5) if r != rank] for rank in range(5)]


def test_whoever_waits_serves_and_does_not_leave_a_pair_half_connected():
    """Rank 2 asks rank 0, which wants rank 1 only, and does nothing afterwards."""

    def wants(peer, after=None):
        def plan(rank):
            if after is not None:
                rank.sees(after)
            rank.connect(peer)
            return rank.pairs.connected

        return plan

    world = World(3)
    world.slow[2, 0] = 0.6  # so that rank 0 has all it wants before
    assert world.run(wants(1), wants(0, after="mapped/0/2"), wants(0)) == [[1, 2], [0], [0]]


def test_a_pair_that_nobody_asked_for_stays_apart():
    world = World(3)
    assert world.run(lambda rank: rank.connect(1), lambda rank: rank.connect(0)) == [None, None]
    assert sorted(world.began) == [(0, 1), (1, 0)]


def pair_of_three(rank):
    """What each of three ranks hears of its peers, whatever it hears of the others."""
    heard = {}
    for peer in {0, 1, 2} - {rank.rank}:
        try:
            rank.connect(peer)
        except R4DError as error:
            heard[peer] = str(error)
    return heard, rank.pairs.connected


@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        ({"unmappable": {(2, 1)}}, "r4d: rank 2: no peer access"),
        ({"unmappable": {(1, 2), (2, 1)}}, "r4d: rank 1: no peer access"),
        ({"changed": {(2, 1)}}, "r4d: rank 1: wrong bytes"),
        ({"refused": [{1, 2}]}, "r4d: two makers"),
    ],
)
def test_both_ends_hear_why_and_other_pairs_connect(trouble, said):
    world = World(3)
    vars(world).update(trouble)
    assert world.run(*[pair_of_three] * 3) == [
        ({}, [1, 2]),
        ({2: said}, [0]),
        ({1: said}, [0]),
    ]


def test_a_peer_that_comes_too_late_is_named_and_hears_so():
    world = World(3, timeout=1.0)

    def late(rank):
        rank.sees("probed/0/1")
        rank.connect(0)

    def two(rank):
        with pytest.raises(R4DError, match=r"rank 0: gave up rank 1: .* not connected within 1 s"):
            rank.connect(1)
        rank.connect(2)  # the pair that was given up holds up no other

    def third(rank):
        rank.sees("probed/0/1")
        rank.connect(0)

    first, second, last = world.run(two, late, third)
    assert first is None
    assert last is None
    assert "rank 0: gave up rank 1" in str(second)
    assert (1, 0) not in world.began


def test_a_peer_that_is_too_slow_in_the_middle_hears_so():
    world = World(2, timeout=1.0)
    world.slow[1, 0] = 2.0
    first, second = world.run(lambda rank: rank.connect(1), lambda rank: rank.connect(0))
    assert str(first) == "r4d: rank 0: gave up rank 1: the pair was not connected within 1 s"
    assert str(second) == str(first)


def test_after_a_failed_self_test_no_other_is_begun():
    """Which would fail too, and with it its peer's others."""
    world = World(3)

    def broken(rank):
        rank.wrong = "nothing came"
        with pytest.raises(R4DError, match="rank 0: an earlier self-test failed: nothing came"):
            rank.connect(2)

    first, _, last = world.run(broken, lambda rank: None, lambda rank: rank.connect(0))
    assert first is None
    assert str(last) == "r4d: rank 0: an earlier self-test failed: nothing came"
    assert world.began == []


class Broken(Exception):
    """Not of r4d: a compiler's, an interrupt."""


@pytest.mark.parametrize("kind", [Broken, KeyboardInterrupt])
def test_whatever_ends_a_rank_in_the_middle_its_peer_hears_so(kind):
    def breaks(rank):
        def probe(peer):
            raise kind("in the middle")

        try:
            rank.pairs.connect([1], probe)
        except (R4DError, KeyboardInterrupt):
            return rank.pairs.connected
        return "connected"

    first, second = World(2).run(breaks, lambda rank: rank.connect(0))
    assert first == []
    assert "in the middle" in str(second)


@pytest.mark.parametrize(
    "waits",
    [lambda rank: rank.connect(1), lambda rank: rank.meeting.vote("ready", lambda: None)],
    ids=["for a pair", "for a vote"],
)
def test_a_wait_ends_when_the_group_has_failed(waits):
    def plan(rank):
        threading.Timer(0.2, rank.dead.set).start()
        waits(rank)

    start = time.monotonic()
    (found,) = World(2).run(plan)
    assert isinstance(found, PeerDied)
    assert time.monotonic() - start < PATIENCE / 2
