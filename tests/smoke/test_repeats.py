"""Repeated all-reduce: right sums pass, wrong ones are counted, graphs are checked by call."""

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from tp3.comm.launch import launch
from tp3.smoke import repeats
from tp3.smoke.repeats import NBYTES, Checker, Effort, Graph, run_repeats
from tp3.smoke.site import Site
from tp3.smoke.terms import ordered_sum

torch.set_num_threads(1)  # ranks are forked, and a pool of threads does not survive that

KIB = ["8 KiB", "80 KiB", "256 KiB", "512 KiB", "1024 KiB"]


def test_rows_on_cpu():
    told = []
    rows = run_repeats(3, site=Site("cpu"), progress=told.append)
    assert [row["check"] for row in rows] == [
        *(f"eager all_reduce bfloat16 {size}" for size in KIB),
        "all_reduce ranks",
    ]
    assert all(row["ok"] for row in rows), rows
    assert {row["detail"] for row in rows[:-1]} == {"6 calls, 0 mismatches"}
    assert all(row["value"] > 0 for row in rows)
    assert len(told) == 1


def gathered(x):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    return parts


def in_order(x):
    x.copy_(ordered_sum(gathered(x)))


def reversed_order(x):
    x.copy_(ordered_sum(gathered(x)[::-1]))


def from_own_rank(x):
    parts, rank = gathered(x), dist.get_rank()
    x.copy_(ordered_sum(parts[rank:] + parts[:rank]))


def one_value_late(x):
    """The last value of the first rank's result is that of its term."""
    own = x[-1:].clone()
    in_order(x)
    if dist.get_rank() == 0:
        x[-1:] = own


def nothing(x):
    pass


@pytest.mark.parametrize(
    ("all_reduce", "sums", "ranks"),
    [
        (in_order, True, True),
        (reversed_order, False, True),
        (from_own_rank, False, False),
        (one_value_late, False, False),
        (nothing, False, False),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_wrong_sums_are_counted(all_reduce, sums, ranks, monkeypatch):
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    rows = run_repeats(3, site=Site("cpu"), backend="gloo")
    assert [row["ok"] for row in rows[:-1]] == [sums] * len(NBYTES)
    assert rows[-1]["ok"] == ranks
    if not sums:
        assert " mismatches of 73728 values" in rows[0]["detail"]  # 6 calls, 4096 values, 3 ranks
        assert not rows[0]["detail"].startswith("6 calls, 0 ")


class EagerGraph:
    """What stands in for a CUDA graph: the calls of the capture, made again in a replay."""

    def __init__(self):
        self.tensors = []
        self.skip = 0

    def replay(self):
        for tensor in self.tensors[self.skip :]:
            dist.all_reduce(tensor)


@contextmanager
def recorded(graph):
    all_reduce, dist.all_reduce = dist.all_reduce, graph.tensors.append
    yield
    dist.all_reduce = all_reduce


def replayed(rank, world_size, skip):
    torch.cuda.CUDAGraph, torch.cuda.graph = EagerGraph, recorded
    zeros = repeats._zeros
    repeats._zeros = lambda nbytes, device: zeros(nbytes, "cpu")
    checker = Checker(rank, world_size, "cpu")
    graphs = {nbytes: Graph(nbytes) for nbytes in NBYTES[:3]}
    for graph in graphs.values():
        graph.graph.skip = skip
    repeats._run_graphs(checker, graphs, 4)
    burst = graphs[NBYTES[0]].burst(30)
    assert repeats._micros(burst, "cpu", Effort(0, 4, 30, 3)) > 0
    return checker.calls, dict(checker.different), checker.digest.hexdigest()


@pytest.mark.parametrize("skip", [0, 1])
def test_graph_calls_are_checked_one_by_one(skip):
    ranks = launch(replayed, 3, skip)
    for calls, different, _ in ranks:
        assert calls == 3 * 3 * 4
        assert set(different) == {("graph", nbytes) for nbytes in NBYTES[:3]}
        assert all((count > 0) == (skip > 0) for count in different.values())
    assert (len({digest for _, _, digest in ranks}) == 1) == (skip == 0)


def test_rows_of_graphs():
    effort = Effort(300, 20, 30, 5)
    keys = [(mode, nbytes) for mode in ("eager", "graph") for nbytes in NBYTES]
    rank = {
        "micros": dict.fromkeys(keys, 8.04),
        "different": dict.fromkeys(keys, 0),
        "digest": "same",
    }
    wrong = {"different": {**rank["different"], ("graph", 8 << 10): 5}, "micros": rank["micros"]}
    note = "3 ranks on a GPU, through MPS"
    rows = repeats._rows([rank, rank, wrong | {"digest": "other"}], effort, note)
    assert rows[0]["detail"] == f"60 calls, 0 mismatches; {note}"
    assert rows[5]["check"] == "graph all_reduce bfloat16 8 KiB"
    assert rows[5]["detail"] == (
        f"20 replays of 3 calls, 5 mismatches of {60 * 4096 * 3} values; {note}"
    )
    assert [row["ok"] for row in rows] == [True] * 5 + [False] + [True] * 4 + [False]
    assert rows[6]["value"] == 8.0
