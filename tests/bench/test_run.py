"""A run on CPU ranks with peers that fail: named with a reason, the others measured."""

import pytest
import torch

from tp3.bench import peers
from tp3.bench.allreduce import run
from tp3.bench.plan import BUDGET_BYTES, CALLS, MAX_KIB, MODES, Plan
from tp3.bench.report import markdown
from tp3.bench.timing import WARM_TURNS


def small(**changes):
    return Plan(**{"world_size": 2, "device": "cpu", "kib": (8,), "repeats": 3, **changes})


def refuses(rank, room):
    if rank.rank == 1:  # the other rank could: both must leave it out
        raise RuntimeError("no such library.\nand a long story")
    return peers.gloo(rank, room)


def sums_wrong(rank, room):
    return [peers.Peer("gloo", lambda x: x.add_(1), room)]


def right_once(rank, room):
    """Right in its trial, wrong in every call after it."""
    calls = []

    def reduce(x):
        calls.append(x)
        (good,) = peers.gloo(rank, room)
        return good.reduce(x) if len(calls) == 1 else torch.full_like(x, torch.nan)

    return [peers.Peer("gloo", reduce, room)]


@pytest.mark.parametrize(
    ("setup", "what", "reason"),
    [
        (refuses, "gloo", "no such library"),
        (sums_wrong, "gloo", "its first sum is 2.0 at 0, expected 3"),
        (right_once, "gloo, eager, 8 KiB", "rank 0 element 0: got nan"),
    ],
)
def test_a_peer_that_fails_is_named(monkeypatch, setup, what, reason):
    monkeypatch.setitem(peers.SETUPS, "cpu", {("gloo",): setup})
    report = run(small())
    assert set(report.left_out) == {what}
    assert report.left_out[what].startswith(reason)
    assert f"- Left out: {what}: {reason}" in markdown(report)
    (row,) = report.rows
    assert (set(row.us), row.ratios) == ({"r4d"}, {})


def test_every_size_has_a_row_with_both_peers():
    report = run(small(world_size=3, kib=(80, 1, 2048), dtype="float32"))
    assert [row.nbytes >> 10 for row in report.rows] == [1, 80, 2048]
    assert all(set(row.us) == {"r4d", "gloo"} for row in report.rows)
    assert not report.left_out
    assert report.rates_gbs["local copy"] > 0


def test_cuda_without_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match="no GPU; allowed here: cpu"):
        run(small(device="cuda"))


@pytest.mark.parametrize("device", MODES)
def test_every_call_of_a_turn_has_a_buffer_within_the_budget(device):
    for mode in MODES[device]:
        for kib in (8, 1024, 65536, MAX_KIB):
            plan = small(device=device, kib=(kib,), modes=(mode,))
            calls = plan.calls(mode, kib << 10)
            assert 1 <= calls <= max(CALLS[device, mode])
            assert plan.room_bytes == calls * kib << 10 <= max(BUDGET_BYTES, kib << 10)


def test_peers_take_turns_and_the_first_moves():
    from tp3.bench.timing import measure

    order = []

    class Turn:
        def __init__(self, name):
            self.name = name

        def seconds(self):
            order.append(self.name)
            return float(len(order))

    seconds = measure({name: Turn(name) for name in "abc"}, 2)
    assert "".join(order) == "abcbcacababc"
    assert WARM_TURNS == 2
    assert seconds == {"a": [8.0, 10.0], "b": [9.0, 11.0], "c": [7.0, 12.0]}
