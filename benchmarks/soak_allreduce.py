"""All-reduce a hundred thousand times: new data every time, a rank that lags, every bit looked at.

    python benchmarks/soak_allreduce.py --world-size 3 --device cuda --replays 100000

On GPUs a captured graph makes its own data from a counter on the device, adds over all ranks by
every algorithm in turn, and counts the values that differ from the canonical sum. Between replays
one rank after another falls behind, and eager calls come in between. On CPU the same calls, without
a graph.
"""

import argparse
import json
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from tp3.comm.launch import launch
from tp3.smoke.terms import ordered_sum, terms

# Values of bf16: one block; several; unaligned, through a padded copy; and, every now and then, as
# many as the one-shot and two-shot kernels are for.
SMALL, LARGE = (64, 4096, 9999, 131_072), (1_500_000,)
OFTEN, EVERY = 20, 500  # replays from one large message, or late rank, to the next
LATE_CYCLES = 20_000_000


class Step:
    """The calls of one turn; ``bad`` counts wrong values on the device."""

    def __init__(self, rank: int, world_size: int, device: str, numels: tuple[int, ...]) -> None:
        self.rank, self.world_size, self.device = rank, world_size, device
        self.numels = numels
        self.call = torch.zeros((), dtype=torch.int32, device=device)
        self.bad = torch.zeros((), dtype=torch.int64, device=device)

    def __call__(self) -> None:
        for numel in self.numels:
            self.call += 1
            parts = terms(self.world_size, self.call, numel, device=self.device)
            x, want = parts[self.rank].clone(), ordered_sum(parts)
            dist.all_reduce(x)
            self.bad += (x.view(torch.int16) != want.view(torch.int16)).sum()


def soak(rank: int, world_size: int, device: str, replays: int) -> dict[str, float]:
    steps = [Step(rank, world_size, device, numels) for numels in (SMALL, LARGE, SMALL + LARGE)]
    small, large, eager = (_replayed(step) if step is not steps[-1] else step for step in steps)
    begun = time.monotonic()
    for number in range(replays):
        if number % EVERY == 0:
            if number // EVERY % world_size == rank and device == "cuda":
                torch.cuda._sleep(LATE_CYCLES)
            eager()
        small()
        if number % OFTEN == 0:
            large()
    seconds = time.monotonic() - begun if device == "cpu" else _ended(begun)
    wrong, calls = (sum(int(getattr(step, name)) for step in steps) for name in ("bad", "call"))
    return {"wrong": wrong, "calls": calls, "seconds": seconds}


def _replayed(step: Step) -> Callable[[], None]:
    """The step as a graph, on a GPU."""
    step()
    if step.device == "cpu":
        return step
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    replay: Callable[[], None] = graph.replay
    return replay


def _ended(begun: float) -> float:
    torch.cuda.synchronize()
    return time.monotonic() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world-size", type=int, default=3)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--replays", type=int, default=1000)
    parser.add_argument("--timeout", type=float, default=600.0)
    args = parser.parse_args()
    start = "spawn" if args.device == "cuda" else "fork"
    ranks = launch(
        soak,
        args.world_size,
        args.device,
        args.replays,
        device=args.device,
        start=start,
        timeout=args.timeout,
    )
    print(json.dumps({"world_size": args.world_size, "device": args.device, "ranks": ranks}))
    if any(rank["wrong"] for rank in ranks):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
