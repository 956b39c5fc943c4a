"""Timing of products: a gate, ceilings of the GPU, and turns of peers over more than the cache."""

import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from tests.kernels.linear.cases import E4M3, Case, judge, operands, random_cases
from tests.kernels.linear.codes import wrong_e2m1, wrong_e4m3
from tp3.kernels.launch import INTERPRETED

DEVICE = "cpu" if INTERPRETED else "cuda"
WORKERS = 8
CACHE_BYTES = 160 << 20  # an H200 caches 50 MiB
TURNS, WARM = (2, 0) if INTERPRETED else (9, 2)
MOST_CALLS = 24

Call = Callable[[], Any]


def share_of_gate(share: int, of: int, count: int) -> float:
    """The largest error over PyTorch's. Errors: AssertionError."""
    # Sums of bf16 products in bf16 would widen the bound.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    if share == 0:
        assert (wrong_e2m1(DEVICE), wrong_e4m3(DEVICE)) == (0, 0), "a code is decoded wrong"
    sizes = (17, 120, 300) if INTERPRETED else (300, 9000, 6000)
    cases = list(enumerate(random_cases(count, 0, *sizes)))[share::of]
    return max(judge(case, DEVICE, seed) for seed, case in cases)


def gate(count: int) -> str:
    begun = time.monotonic()
    if INTERPRETED:
        worst = share_of_gate(0, 1, count)
    else:  # processes, since each compiles what it needs
        with ProcessPoolExecutor(WORKERS, multiprocessing.get_context("spawn")) as pool:
            shares = [pool.submit(share_of_gate, i, WORKERS, count) for i in range(WORKERS)]
            worst = max(share.result() for share in shares)
    seconds = time.monotonic() - begun
    return (
        f"Judged: every code of e2m1 with every scale, of e4m3, and {count} random shapes; largest "
        f"error {worst:.2f} of PyTorch's ({seconds:.0f} s)."
    )


class Turn:
    """``calls`` one after another; seconds of one."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self.calls = calls
        self.run()
        if INTERPRETED:
            return
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.run()
        self.marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def run(self) -> None:
        for call in self.calls:
            call()

    def seconds(self) -> float:
        if INTERPRETED:
            begun = time.perf_counter()
            self.run()
            return (time.perf_counter() - begun) / len(self.calls)
        self.marks[0].record()
        self.graph.replay()
        self.marks[1].record()
        self.marks[1].synchronize()
        return float(self.marks[0].elapsed_time(self.marks[1])) * 1e-3 / len(self.calls)


def measured(peers: dict[str, Sequence[Call]]) -> dict[str, list[float]]:
    """Lower quartile, median and upper quartile in µs of each peer, which take turns."""
    turns = {name: Turn(calls) for name, calls in peers.items()}
    seconds: dict[str, list[float]] = {name: [] for name in peers}
    for turn in range(WARM + TURNS):
        for name, peer in turns.items():
            figure = peer.seconds()
            if turn >= WARM:
                seconds[name].append(figure)
    return {name: [1e6 * q for q in statistics.quantiles(s, n=4)] for name, s in seconds.items()}


def copies_of(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """As many as the cache cannot hold."""
    size = sum(tensor.nbytes for tensor in tensors)
    count = 2 if INTERPRETED else max(2, min(MOST_CALLS, -(-CACHE_BYTES // size)))
    return [list(tensors), *([t.clone() for t in tensors] for _ in range(count - 1))]


def ceilings(mib: int, size: int) -> dict[str, float]:
    """Bytes per second of a copy, read and written; flops per second of bf16 and FP8 products."""
    source = torch.empty(mib << 20, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    a, b = (torch.randn(size, size, device=DEVICE).bfloat16() for _ in range(2))
    peers: dict[str, Sequence[Call]] = {
        "copy": [lambda: target.copy_(source)],
        "bf16": [lambda: a @ b.mT] * 4,
    }
    if not INTERPRETED:
        a8, b8, one = a.to(E4M3), b.to(E4M3), torch.ones((), device=DEVICE)
        peers["fp8"] = [lambda: torch._scaled_mm(a8, b8.mT, one, one, out_dtype=torch.bfloat16)] * 4
    work = {"copy": 2 * source.nbytes, "bf16": 2 * size**3, "fp8": 2 * size**3}
    return {name: work[name] / us[1] * 1e6 for name, us in measured(peers).items()}


def same_copy(nbytes: int) -> list[Call]:
    """Copies that read and write ``nbytes`` together."""
    source = torch.zeros(nbytes // 2, dtype=torch.uint8, device=DEVICE)
    pairs = copies_of([source, torch.empty_like(source)])
    return [lambda pair=pair: pair[1].copy_(pair[0]) for pair in pairs]


@lru_cache(maxsize=1)
def _weights(kernel: str, n: int, k: int, w: str, many: int) -> list[list[torch.Tensor]]:
    return copies_of(operands(Case(kernel, 1, n, k, w=w, many=many), DEVICE)[1:3])


def operands_of(case: Case) -> tuple[list[torch.Tensor], list[list[torch.Tensor]], list[Any]]:
    """x, copies of weight and scales, what follows them; weights are kept from row to row."""
    x, _, _, *rest = operands(replace(case, n=1), DEVICE)
    return [x], _weights(case.kernel, case.n, case.k, case.w, case.many), rest
