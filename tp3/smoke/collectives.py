"""Every collective once on the ranks at hand: right against fp64, equal bits on all ranks, timed,
on CPU beside Gloo (which has few collectives on GPUs; NCCL takes one rank per GPU).

W ranks; each brings N Gaussian values it can also make for every other rank. A moved value must
arrive to the bit. A sum may differ from the one in fp64 by what fp32 accumulation and one final
rounding can cost and no more: (W-1)·2^-24·Σ|x| + u·|Σx|, with u the unit roundoff of the dtype.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tp3.smoke.names import all_gather_single, reduce_scatter_single
from tp3.smoke.rows import Row, row
from tp3.smoke.site import Site, synchronize

UNIT_ROUNDOFF = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
REPEATS = 15


@dataclass(frozen=True)
class Case:
    """A collective: ``run(x, group)`` on this rank's x [N], ``expect(xs, rank)`` what it gives of
    all xs [W, N].

    ``summed``: the result is a sum over ranks; ``alike``: it is the same on all ranks.
    """

    run: Callable[[Tensor, Any], Tensor]
    expect: Callable[[Tensor, int], Tensor]
    summed: bool = False
    alike: bool = False


def _all_reduce(x: Tensor, group: Any) -> Tensor:
    dist.all_reduce(x, group=group)
    return x


def _reduce(x: Tensor, group: Any) -> Tensor:
    dist.reduce(x, 0, group=group)
    return x


def _reduce_scatter(x: Tensor, group: Any) -> Tensor:
    out = x.new_empty(x.numel() // dist.get_world_size(group))
    reduce_scatter_single(out, x, group=group)
    return out


def _broadcast(x: Tensor, group: Any) -> Tensor:
    dist.broadcast(x, 0, group=group)
    return x


def _all_gather(x: Tensor, group: Any) -> Tensor:
    out = x.new_empty(x.numel() * dist.get_world_size(group))
    all_gather_single(out, x, group=group)
    return out


def _gather(x: Tensor, group: Any) -> Tensor:
    world_size = dist.get_world_size(group)
    outs = [torch.empty_like(x) for _ in range(world_size)] if dist.get_rank(group) == 0 else None
    dist.gather(x, outs, 0, group=group)
    return x if outs is None else torch.cat(outs)


def _scatter(x: Tensor, group: Any) -> Tensor:
    parts = list(x.chunk(dist.get_world_size(group)))
    out = torch.empty_like(parts[0])
    dist.scatter(out, parts if dist.get_rank(group) == 0 else None, 0, group=group)
    return out


def _all_to_all(x: Tensor, group: Any) -> Tensor:
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=group)
    return out


def _send_recv(x: Tensor, group: Any) -> Tensor:
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    if world_size == 1:
        return x
    out = torch.empty_like(x)
    sending = dist.isend(x, (rank + 1) % world_size, group=group)
    dist.recv(out, (rank - 1) % world_size, group=group)
    assert sending is not None
    sending.wait()
    return out


def _part(x: Tensor, rank: int, world_size: int) -> Tensor:
    return x.view(world_size, -1)[rank]


CASES: dict[str, Case] = {
    "all_reduce": Case(_all_reduce, lambda xs, r: xs, summed=True, alike=True),
    "reduce": Case(_reduce, lambda xs, r: xs if r == 0 else xs[r : r + 1], summed=True),
    "reduce_scatter": Case(
        _reduce_scatter, lambda xs, r: xs.view(len(xs), len(xs), -1)[:, r], summed=True
    ),
    "broadcast": Case(_broadcast, lambda xs, r: xs[0], alike=True),
    "all_gather": Case(_all_gather, lambda xs, r: xs.flatten(), alike=True),
    "gather": Case(_gather, lambda xs, r: xs.flatten() if r == 0 else xs[r]),
    "scatter": Case(_scatter, lambda xs, r: _part(xs[0], r, len(xs))),
    "all_to_all": Case(_all_to_all, lambda xs, r: xs.view(len(xs), len(xs), -1)[:, r].flatten()),
    "send/recv": Case(_send_recv, lambda xs, r: xs[r - 1]),
}
SIZES = ((torch.float32, 8 << 10), (torch.float32, 1 << 20), (torch.bfloat16, 80 << 10))


def run_collectives(
    world_size: int, *, site: Site, progress: Callable[[str], None] | None = None
) -> list[Row]:
    """Rows `{"check", "detail", "value", "ok"}`; ``value`` is the slowest rank's median in µs."""
    if progress:
        progress(f"collectives on {world_size} ranks")
    ranks = site.launch(_rank, world_size, site.device)
    note = site.sharing(world_size)
    return [
        _row(name, dtype, nbytes, [rank[name, dtype, nbytes] for rank in ranks], note)
        for name, dtype, nbytes in ranks[0]
    ]


def _rank(
    rank: int, world_size: int, device: str
) -> dict[tuple[str, torch.dtype, int], dict[str, Any]]:
    groups = {"r4d": None}
    if device == "cpu":
        groups["gloo"] = dist.new_group(backend="gloo", timeout=timedelta(seconds=60))
    results = {}
    for dtype, nbytes in SIZES:
        numel = nbytes // dtype.itemsize // world_size * world_size
        xs = torch.stack([rank_data(r, numel, dtype) for r in range(world_size)])
        for name, case in CASES.items():
            results[name, dtype, nbytes] = _measure(case, xs, rank, device, groups)
    return results


def rank_data(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)


def _measure(
    case: Case, xs: Tensor, rank: int, device: str, groups: Mapping[str, Any]
) -> dict[str, Any]:
    mine = xs[rank].to(device)
    out = case.run(mine.clone(), None).cpu()
    times: dict[str, list[float]] = {name: [] for name in groups}
    for _ in range(REPEATS):
        for name, group in groups.items():
            x = mine.clone()
            dist.barrier()
            synchronize(device)
            start = time.perf_counter()
            case.run(x, group)
            synchronize(device)
            times[name].append(time.perf_counter() - start)
    median = {name: sorted(values)[len(values) // 2] * 1e6 for name, values in times.items()}
    digest = hashlib.sha256(out.view(torch.uint8).numpy().tobytes()).hexdigest()
    return {**median, "digest": digest, "wrong": wrong(case, out, xs, rank)}


def wrong(case: Case, out: Tensor, xs: Tensor, rank: int) -> str:
    """The first element that is not what it must be, in words; empty when all are."""
    expected = case.expect(xs, rank).double()
    bound = torch.zeros(1, dtype=torch.float64)
    if case.summed:
        total = expected.sum(0)
        accumulated = (len(xs) - 1) * 2.0**-24 * expected.abs().sum(0)
        bound, expected = accumulated + UNIT_ROUNDOFF[out.dtype] * total.abs(), total
    off = ~((out.double() - expected).abs() <= bound)  # a NaN is off too
    if not bool(off.any()):
        return ""
    at = int(off.nonzero()[0])
    return f"rank {rank} element {at}: got {float(out[at])}, expected {float(expected[at])}"


def _row(
    name: str, dtype: torch.dtype, nbytes: int, ranks: Sequence[dict[str, Any]], note: str
) -> Row:
    wrong = next((rank["wrong"] for rank in ranks if rank["wrong"]), "")
    if CASES[name].alike and len({rank["digest"] for rank in ranks}) > 1:
        wrong = wrong or "ranks ended with different bits"
    mine = max(rank["r4d"] for rank in ranks)
    if "gloo" in ranks[0]:
        peer = max(rank["gloo"] for rank in ranks)
        note = f"Gloo {peer:.0f} µs, ratio {mine / peer:.2f}"
    check = f"{name} {str(dtype)[6:]} {nbytes >> 10} KiB"
    return row(check, wrong or note, round(mine, 1), not wrong)
