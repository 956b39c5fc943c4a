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

import torch
import torch.distributed as dist

from tp3.comm.launch import launch
from tp3.smoke.terms import ordered_sum, terms

# Values of bf16: sentinel; sentinel, several blocks; unaligned, through a padded copy; as large as
# the one-shot and two-shot kernels are for.
NUMELS = {"cuda": (64, 4096, 9999, 131_072, 1_500_000), "cpu": (64, 4096, 9999)}
EVERY = 500  # replays from one late rank to the next
LATE_CYCLES = 20_000_000


class Step:
    """The calls of one turn; ``bad`` counts wrong values on the device."""

    def __init__(self, rank: int, world_size: int, device: str) -> None:
        self.rank, self.world_size, self.device = rank, world_size, device
        self.call = torch.zeros((), dtype=torch.int32, device=device)
        self.bad = torch.zeros((), dtype=torch.int64, device=device)

    def __call__(self) -> None:
        for numel in NUMELS[self.device]:
            self.call += 1
            parts = terms(self.world_size, self.call, numel, device=self.device)
            x, want = parts[self.rank].clone(), ordered_sum(parts)
            dist.all_reduce(x)
            self.bad += (x.view(torch.int16) != want.view(torch.int16)).sum()


def soak(rank: int, world_size: int, device: str, replays: int) -> dict[str, float]:
    step, eager = Step(rank, world_size, device), Step(rank, world_size, device)
    step()
    run = step
    if device == "cuda":
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        run = graph.replay
    begun = time.monotonic()
    for number in range(replays):
        if number % EVERY == 0:
            if number // EVERY % world_size == rank and device == "cuda":
                torch.cuda._sleep(LATE_CYCLES)
            eager()
        run()
    seconds = time.monotonic() - begun if device == "cpu" else _ended(begun)
    bad = int(step.bad) + int(eager.bad)
    return {"wrong": bad, "calls": int(step.call) + int(eager.call), "seconds": seconds}


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
