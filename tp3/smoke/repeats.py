"""All-reduce again and again, new data every time, every result to the bit: eager calls over five
sizes in turn and, on GPUs, captured graphs.

No result is held against what came from a peer: each rank makes all ranks' terms and their sum
itself (`terms`). It counts the values that differ and keeps a hash of all results, which must end
the same on all ranks. Times are taken afterwards, on zeros, without checks in between.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tp3.smoke.rows import Row, row
from tp3.smoke.site import Site, synchronize
from tp3.smoke.terms import num_different, ordered_sum, terms

NBYTES = (8 << 10, 80 << 10, 256 << 10, 512 << 10, 1 << 20)
CALLS_PER_GRAPH = 3  # odd: what alternates between two places begins each replay in the other


@dataclass(frozen=True)
class Effort:
    """How much is run: eager `calls`, all sizes together; `replays` of each size's graph; `timed`
    calls per measurement; `measurements`, of which the median counts."""

    calls: int
    replays: int
    timed: int
    measurements: int


EFFORT = {"cpu": Effort(30, 0, 6, 3), "cuda": Effort(300, 20, 30, 5)}


def run_repeats(
    world_size: int,
    *,
    site: Site,
    backend: str = "r4d",
    progress: Callable[[str], None] | None = None,
) -> list[Row]:
    """Rows `{"check", "detail", "value", "ok"}`; ``value`` is the slowest rank's µs per call."""
    effort = EFFORT[site.device]
    if progress:
        progress(f"all_reduce with changing data on {world_size} ranks")
    ranks = site.launch(_rank, world_size, site.device, effort, backend=backend)
    return _rows(ranks, effort, site.sharing(world_size))


def _rank(rank: int, world_size: int, device: str, effort: Effort) -> dict[str, Any]:
    checker = Checker(rank, world_size, device)
    _run_eager(checker, effort.calls)
    timed: dict[tuple[str, int], Callable[[], None]] = {
        ("eager", nbytes): _eager_burst(nbytes, device, effort.timed) for nbytes in NBYTES
    }
    if effort.replays:
        graphs = {nbytes: Graph(nbytes) for nbytes in NBYTES}
        _run_graphs(checker, graphs, effort.replays)
        for nbytes, graph in graphs.items():
            timed["graph", nbytes] = graph.burst(effort.timed)
    return {
        "micros": {key: _micros(burst, device, effort) for key, burst in timed.items()},
        "different": dict(checker.different),
        "digest": checker.digest.hexdigest(),
    }


class Checker:
    """One rank's terms call by call, and what came out: counts of different values by mode and
    size, and a running hash."""

    def __init__(self, rank: int, world_size: int, device: str) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self.calls = 0
        self.different: Counter[tuple[str, int]] = Counter()
        self.digest = hashlib.sha256()

    def give(self, nbytes: int) -> tuple[Tensor, Tensor]:
        """This rank's term of the next call, and the sum."""
        parts = terms(self.world_size, self.calls, _numel(nbytes), device=self.device)
        self.calls += 1
        return parts[self.rank], ordered_sum(parts)

    def take(self, mode: str, result: Tensor, expected: Tensor) -> None:
        key = mode, result.numel() * result.element_size()
        self.different[key] += num_different(result, expected)
        self.digest.update(result.cpu().view(torch.int16).numpy().tobytes())


class Graph:
    """A CUDA graph of CALLS_PER_GRAPH all-reduces of one size, each on its own tensor."""

    def __init__(self, nbytes: int) -> None:
        self.tensors = [_zeros(nbytes, "cuda") for _ in range(CALLS_PER_GRAPH)]
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for tensor in self.tensors:
                dist.all_reduce(tensor)

    def burst(self, calls: int) -> Callable[[], None]:
        for tensor in self.tensors:
            tensor.zero_()

        def run() -> None:
            for _ in range(calls // CALLS_PER_GRAPH):
                self.graph.replay()

        return run


def _run_eager(checker: Checker, calls: int) -> None:
    for call in range(calls):
        tensor, expected = checker.give(NBYTES[call % len(NBYTES)])
        dist.all_reduce(tensor)
        checker.take("eager", tensor, expected)


def _run_graphs(checker: Checker, graphs: dict[int, Graph], replays: int) -> None:
    dist.barrier()
    for _ in range(replays):
        for nbytes, graph in graphs.items():
            expected = []
            for tensor in graph.tensors:
                term, total = checker.give(nbytes)
                tensor.copy_(term)
                expected.append(total)
            graph.graph.replay()
            for tensor, total in zip(graph.tensors, expected, strict=True):
                checker.take("graph", tensor, total)


def _eager_burst(nbytes: int, device: str, calls: int) -> Callable[[], None]:
    tensor = _zeros(nbytes, device)

    def run() -> None:
        for _ in range(calls):
            dist.all_reduce(tensor)

    return run


def _micros(burst: Callable[[], None], device: str, effort: Effort) -> float:
    """Median over the measurements, per call."""
    times = []
    for _ in range(effort.measurements):
        dist.barrier()
        synchronize(device)
        start = time.perf_counter()
        burst()
        synchronize(device)
        times.append((time.perf_counter() - start) / effort.timed * 1e6)
    return sorted(times)[len(times) // 2]


def _rows(ranks: Sequence[dict[str, Any]], effort: Effort, note: str) -> list[Row]:
    done = {
        "eager": (effort.calls // len(NBYTES), f"{effort.calls // len(NBYTES)} calls"),
        "graph": (
            effort.replays * CALLS_PER_GRAPH,
            f"{effort.replays} replays of {CALLS_PER_GRAPH} calls",
        ),
    }
    rows = []
    for mode, nbytes in ranks[0]["micros"]:
        calls, what = done[mode]
        different = sum(rank["different"][mode, nbytes] for rank in ranks)
        of = f" of {calls * _numel(nbytes) * len(ranks)} values" if different else ""
        detail = f"{what}, {different} mismatches{of}" + (f"; {note}" if note else "")
        micros = max(rank["micros"][mode, nbytes] for rank in ranks)
        check = f"{mode} all_reduce bfloat16 {nbytes >> 10} KiB"
        rows.append(row(check, detail, round(micros, 1), not different))
    same = len({rank["digest"] for rank in ranks}) == 1
    rows.append(row("all_reduce ranks", "every result bit-identical on every rank", same, same))
    return rows


def _numel(nbytes: int) -> int:
    return nbytes // torch.bfloat16.itemsize


def _zeros(nbytes: int, device: str) -> Tensor:
    return torch.zeros(_numel(nbytes), dtype=torch.bfloat16, device=device)
