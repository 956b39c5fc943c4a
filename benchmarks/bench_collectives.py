"""r4d against Gloo, and against vLLM's C++ shared-memory all-reduce where that is installed.

    python benchmarks/bench_collectives.py --world-size 3 --write

Each size first passes the correctness gate of `tp3 smoke`, then the peers take turns: ten calls
each up to 1 MiB, one call above. A figure is the slowest rank's median in µs per call; the spread
is its quartiles. Losing rows are printed.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tp3 import __version__
from tp3.comm.launch import launch
from tp3.smoke.collectives import CASES, rank_data, wrong

RESULTS = Path(__file__).parent / "results"
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
SIZES = tuple(1024 * kib for kib in (8, 80, 256, 1024, 4096, 16384, 65536))
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Bytes that a call of the timed size may take to the next one, kept small enough to repeat often.
BUDGET_BYTES = 256 << 20

Call = Callable[[torch.Tensor], Any]


def vllm_all_reduce(rank: int, world_size: int) -> Call | None:
    """vLLM's C++ all-reduce of CPU ranks on one host; None where it is not installed."""
    try:
        import vllm._C  # noqa: F401
    except ImportError:
        return None
    operators = torch.ops._C
    name = f"tp3-bench-{dist.group.WORLD.group_name}-{world_size}"
    handle = operators.init_shm_manager(name, world_size, rank, 1)
    dist.barrier()
    operators.join_shm_manager(handle, name)
    dist.barrier()
    if rank == 0:
        for path in Path("/dev/shm").glob(f"{name}*"):
            path.unlink()
    return lambda x: operators.shm_allreduce(handle, x)


def rank_main(rank: int, world_size: int, names: Sequence[str], sizes: Sequence[int]) -> list[Any]:
    gloo = dist.new_group(backend="gloo", timeout=timedelta(seconds=120))
    vllm = vllm_all_reduce(rank, world_size)
    records = []
    for name in names:
        case = CASES[name]
        peers: dict[str, Call] = {
            "r4d": lambda x, case=case: case.run(x, None),
            "gloo": lambda x, case=case: case.run(x, gloo),
        }
        if vllm is not None and name == "all_reduce":
            peers["vllm"] = vllm
        for dtype_name, dtype in DTYPES.items():
            for nbytes in sizes:
                # The size of a row is that of the whole tensor: what a rank ends or starts with.
                share = nbytes // world_size if name == "all_gather" else nbytes
                numel = share // dtype.itemsize // world_size * world_size
                xs = torch.stack([rank_data(r, numel, dtype) for r in range(world_size)])
                fault = wrong(case, case.run(xs[rank].clone(), None), xs, rank)
                assert not fault, f"{name} {dtype_name} {nbytes}: {fault}"
                times = measure(peers, xs[rank], nbytes)
                records.append(
                    {"collective": name, "dtype": dtype_name, "nbytes": nbytes, "times": times}
                )
    return records


def measure(peers: dict[str, Call], source: torch.Tensor, nbytes: int) -> dict[str, list[float]]:
    """Seconds per call, the peers taking turns, each turn from a barrier and fresh data."""
    times: dict[str, list[float]] = {peer: [] for peer in peers}
    calls = 10 if nbytes <= 1 << 20 else 1
    repeats = max(7, min(40, BUDGET_BYTES // nbytes))
    x = source.clone()
    for repeat in range(repeats + 2):
        for peer, call in peers.items():
            x.copy_(source)
            dist.barrier()
            start = time.perf_counter()
            for _ in range(calls):
                call(x)
            if repeat >= 2:
                times[peer].append((time.perf_counter() - start) / calls)
    return times


def slowest(ranks: Sequence[Any], index: int, peer: str) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile of the slowest rank, in µs."""
    quartiles = [statistics.quantiles(rank[index]["times"][peer], n=4) for rank in ranks]
    low, middle, high = max(quartiles, key=lambda q: q[1])
    return low * 1e6, middle * 1e6, high * 1e6


def table(world_size: int, ranks: Sequence[Any]) -> tuple[list[str], list[dict[str, Any]]]:
    """A markdown table and the same as records."""
    peers = list(ranks[0][0]["times"])
    lines = [
        f"| W={world_size} | dtype | KiB | " + " | ".join(peers) + " | of Gloo | r4d quartiles |",
        "|---" * (len(peers) + 5) + "|",
    ]
    records = []
    for index, row in enumerate(ranks[0]):
        figures = {peer: slowest(ranks, index, peer) for peer in row["times"]}
        ratio = figures["r4d"][1] / figures["gloo"][1]
        cells = [f"{figures[peer][1]:.0f}" if peer in figures else "" for peer in peers]
        low, _, high = figures["r4d"]
        lines.append(
            f"| {row['collective']} | {row['dtype']} | {row['nbytes'] >> 10} | "
            + " | ".join(cells)
            + f" | {ratio:.2f} | {low:.0f}–{high:.0f} |"
        )
        keys = ("collective", "dtype", "nbytes")
        records.append({"world_size": world_size, **{key: row[key] for key in keys}, "us": figures})
    return lines, records


def machine() -> str:
    model = next(
        line.split(":")[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    )
    return f"{len(os.sched_getaffinity(0))} cores of {model}, {platform.machine()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world-size", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--collective", nargs="+", default=list(COLLECTIVES), choices=COLLECTIVES)
    parser.add_argument("--max-kib", type=int, default=SIZES[-1] >> 10)
    parser.add_argument("--write", metavar="HARDWARE", help="write results/…_HARDWARE_DATE.md")
    args = parser.parse_args()
    sizes = [size for size in SIZES if size <= args.max_kib << 10]
    head = f"tp3 {__version__}, torch {torch.__version__}, {machine()}, one thread per rank"
    lines, records = [head, ""], []
    print(head)
    for world_size in args.world_size:
        ranks = launch(rank_main, world_size, args.collective, sizes, timeout=500.0)
        text, more = table(world_size, ranks)
        print("\n".join(text), flush=True)
        lines += [*text, ""]
        records += more
    if args.write:
        path = RESULTS / f"collectives_{args.write}_{date.today()}"
        path.with_suffix(".md").write_text("# Collectives on CPU ranks\n\n" + "\n".join(lines))
        path.with_suffix(".json").write_text(json.dumps({"head": head, "rows": records}, indent=1))


if __name__ == "__main__":
    main()
