"""All-reduce, residual add, RMSNorm and FP8: in one kernel, and one after another.

    python benchmarks/bench_nq.py --write 2xh200            # a rank for each GPU
    python benchmarks/bench_nq.py --world-size 3 --mps      # ranks that share GPUs
    python benchmarks/bench_nq.py --tiny                    # on a CPU, to try the script

First the fused results are held to the separate steps, bit by bit. Then the peers take turns: a
turn is a CUDA graph of calls on buffers of their own, a figure the slowest rank's median in µs per
call, launches within the graph included. Losing rows stay.

- fused: ``tp3.comm.fused.all_reduce_rms_norm``
- r4d, kernel: r4d's all-reduce, then the plain kernel that does the rest at once
- r4d, torch: r4d's all-reduce, then PyTorch's operators, as an engine without kernels has them
- nccl, torch: NCCL's all-reduce, then the same operators; where each rank has a GPU
- r4d, vllm: r4d's all-reduce, then vLLM's kernels as it runs them by itself: residual add and
  norm in one, FP8 in another; where vLLM can be imported
"""

import argparse
import importlib
import json
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import date, timedelta
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist
from torch import Tensor

from tp3.bench.allreduce import default_device, default_world_size
from tp3.bench.machine import hardware, versions
from tp3.bench.peers import ENV, Peer
from tp3.bench.ranks import Rank
from tp3.bench.report import Row, row
from tp3.bench.timing import TURNS, measure
from tp3.comm.fused import all_reduce_rms_norm
from tp3.comm.launch import launch
from tp3.kernels import reference
from tp3.kernels.normed import LARGEST_E4M3, SMALLEST_SCALE, Norm, Normed
from tp3.smoke.mps import mps_daemon

RESULTS = Path(__file__).parent / "results"
QUANTS = (None, "token")
TIMEOUT_S = 120.0
LIMIT = 0.6

Steps = Callable[[Tensor, Tensor, Tensor, Norm], Normed]


def native(y: Tensor, residual: Tensor, weight: Tensor, norm: Norm) -> Normed:
    """The steps as operators of PyTorch."""
    v = y.float() + residual.float()
    root = torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + norm.eps)
    n = (v * root * weight.float()).bfloat16()
    if norm.quant is None:
        return Normed(n, v.bfloat16(), None)
    wide = n.float()
    scale = (wide.abs().amax(-1, keepdim=True) / LARGEST_E4M3).clamp(min=SMALLEST_SCALE)
    out = (wide / scale).clamp(-LARGEST_E4M3, LARGEST_E4M3).to(torch.float8_e4m3fn)
    return Normed(out, v.bfloat16(), scale[:, 0])


def of_vllm(x: Tensor, residual: Tensor, weight: Tensor, norm: Norm) -> Normed:
    """vLLM's kernels, which write over x and residual."""
    ops = torch.ops._C
    ops.fused_add_rms_norm(x, residual, weight, norm.eps)
    if norm.quant is None:
        return Normed(x, residual, None)
    out = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    scale = torch.empty(len(x), 1, dtype=torch.float32, device=x.device)
    ops.dynamic_per_token_scaled_fp8_quant(out, x, scale, None)
    return Normed(out, residual, scale)


@dataclass(frozen=True)
class Plan:
    """What is measured, on a GPU (device "cuda") unless to try the script."""

    device: str = "cuda"
    rows: tuple[int, ...] = (1, 4, 16, 64)
    width: int = 5120
    calls: int = 20
    repeats: int = 21

    @property
    def mode(self) -> str:
        return "graph" if self.device == "cuda" else "eager"


TINY = Plan("cpu", (1, 4), 256, calls=2, repeats=3)
TAKING_TURNS = Plan(calls=3, repeats=7)  # ranks on one GPU without MPS: milliseconds a call


class Operands:
    """Of one size: x of this rank, residual and weight alike on all."""

    def __init__(self, rank: Rank, rows: int, width: int, norm: Norm) -> None:
        alike = torch.Generator().manual_seed(0)
        mine = torch.Generator().manual_seed(1 + rank.rank)

        def made(generator: torch.Generator, *shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(rank.device, rank.dtype)

        self.x, self.norm, self.shape = made(mine, rows, width), norm, (rows, width)
        self.residual, self.weight = made(alike, rows, width), made(alike, width)

    def fused(self, x: Tensor) -> Normed:
        norm, x = self.norm, x.view(self.shape)
        return all_reduce_rms_norm(x, self.residual, self.weight, norm.eps, quant=norm.quant)

    def apart(self, x: Tensor, steps: Steps, group: Any) -> Normed:
        dist.all_reduce(x, group=group)
        return steps(x.view(self.shape), self.residual, self.weight, self.norm)


def peers_of(
    rank: Rank, operands: Operands, steps: Steps, nccl: Any, calls: int
) -> dict[str, Peer]:
    ways: dict[str, Callable[[Tensor], Normed]] = {
        "fused": operands.fused,
        "r4d, kernel": partial(operands.apart, steps=steps, group=None),
        "r4d, torch": partial(operands.apart, steps=native, group=None),
    }
    if nccl is not None:
        ways["nccl, torch"] = partial(operands.apart, steps=native, group=nccl)
    if find_spec("vllm") is not None and rank.device.type == "cuda":
        importlib.import_module("vllm._custom_ops")  # registers them
        ways["r4d, vllm"] = partial(operands.apart, steps=of_vllm, group=None)
    room = torch.empty(calls * operands.x.numel(), dtype=rank.dtype, device=rank.device)
    return {name: Peer(name, lambda x, way=way: way(x).out, room) for name, way in ways.items()}


def gate(operands: Operands, steps: Steps) -> None:
    """Errors: AssertionError unless the fused bits are those of the steps."""
    fused = operands.fused(operands.x.clone())
    apart = operands.apart(operands.x.clone().view(-1), steps, None)
    for name, got, wanted in zip(fused._fields, fused, apart, strict=True):
        if wanted is not None:
            same = torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))
            assert same, f"{name} of {list(operands.shape)}, {operands.norm}: fused bits differ"


def rank_main(index: int, world_size: int, plan: Plan) -> dict[str, Any]:
    on_gpu = plan.device == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    host = dist.new_group(backend="gloo", timeout=timedelta(seconds=TIMEOUT_S))
    shared = on_gpu and torch.cuda.device_count() < world_size
    rank = Rank(index, world_size, device, torch.bfloat16, host, shared)
    nccl = dist.new_group(backend="nccl") if on_gpu and not shared else None
    steps: Steps = reference.add_rms_norm
    if on_gpu:
        from tp3.kernels.norm import add_rms_norm as steps
    seconds = {}
    for quant, rows in product(QUANTS, plan.rows):
        operands = Operands(rank, rows, plan.width, Norm(1e-6, quant=quant))
        gate(operands, steps)
        turns = {
            name: TURNS[plan.mode](rank, peer, operands.x.view(-1), plan.calls)
            for name, peer in peers_of(rank, operands, steps, nccl, plan.calls).items()
        }
        seconds[quant or "bf16", rows] = measure(turns, plan.repeats)
    rank.wait()
    rank.gather(None)
    stats = dist.group.WORLD.group.stats()
    return {
        "seconds": seconds,
        "hardware": hardware(plan.device),
        "versions": versions(plan.device),
        "carried": [name.split("/")[1] for name in stats if "rms_norm" in name],
    }


def table(rows: dict[tuple[str, int], Row]) -> list[str]:
    names = list(next(iter(rows.values())).us)
    lines = ["| out | M | " + " | ".join(f"{name}, µs (quartiles)" for name in names)]
    lines[0] += " | " + " | ".join(f"of {name}" for name in names[1:]) + " |"
    lines.append("|---" * (1 + 2 * len(names)) + "|")
    for (out, m), figures in rows.items():
        us = figures.us
        cells = [f"{us[n].median:.1f} ({us[n].low:.1f}–{us[n].high:.1f})" for n in names]
        cells += [f"{us['fused'].median / us[n].median:.2f}" for n in names[1:]]
        lines.append(f"| {out} | {m} | " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world-size", type=int, help="ranks; by default one for each GPU, or 3")
    parser.add_argument("--mps", action="store_true", help="let ranks that share a GPU run at once")
    parser.add_argument("--write", metavar="HARDWARE", help="write results/nq_HARDWARE_DATE.*")
    parser.add_argument("--tiny", action="store_true", help="on a CPU, to try the script")
    args = parser.parse_args()
    kind = "cpu" if args.tiny else default_device()
    if kind == "cpu" and not args.tiny:
        print("bench_nq needs a GPU")
        return
    begun, world_size = time.monotonic(), args.world_size or default_world_size(kind)
    plan = TINY if args.tiny else Plan()
    if not args.tiny and torch.cuda.device_count() < world_size and not args.mps:
        plan = TAKING_TURNS
    with mps_daemon() if args.mps else nullcontext({}) as env:
        found = launch(
            rank_main,
            world_size,
            plan,
            start="spawn" if kind == "cuda" else "fork",
            device=kind,
            timeout=TIMEOUT_S,
            env={**ENV, **env},
        )
    first = found[0]
    rows = {
        (out, m): row(
            plan.mode, 2 * m * plan.width, calls=plan.calls, floor_us=None,
            seconds=[rank["seconds"][out, m] for rank in found],
        )
        for out, m in first["seconds"]
    }  # fmt: skip
    known = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    head = [
        f"{first['hardware']}, {known}.",
        f"W={world_size}{', MPS' * args.mps}, K={plan.width}, bf16 in; {plan.calls} calls a turn, "
        f"{plan.repeats} turns each. Fused is the row {', '.join(first['carried'])}; its bits are "
        "those of the steps.",
        f"To reach: at most {LIMIT} of the same steps unfused. The whole run took "
        f"{time.monotonic() - begun:.0f} s.",
    ]
    lines = ["# All-reduce, residual, RMSNorm, FP8", "", "\n\n".join(head), "", *table(rows), ""]
    print("\n".join(lines))
    if args.write:
        path = RESULTS / f"nq_{args.write}_{date.today()}"
        path.with_suffix(".md").write_text("\n".join(lines))
        told = [{"out": out, "m": m, **asdict(figures)} for (out, m), figures in rows.items()]
        path.with_suffix(".json").write_text(json.dumps({"head": head, "rows": told}, indent=1))


if __name__ == "__main__":
    main()
