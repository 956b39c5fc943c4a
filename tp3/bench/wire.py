"""Copy bandwidths of the machine, and what they allow: the floor below which no all-reduce goes.

Rates count the bytes copied once, in GB/s (10^9). A W-rank all-reduce of S bytes must send
2(W-1)/W·S from every rank, while as much arrives: the floor is that over the rate of both ways.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from tp3.bench.ranks import Rank

LOCAL, ONE_WAY, BOTH_WAYS = "local copy", "one way", "both ways at once"
# Bytes of one copy and number of copies, by device.
COPIES = {"cuda": (256 << 20, 20), "cpu": (64 << 20, 4)}


def floor_us(nbytes: int, world_size: int, rate_gbs: float | None) -> float | None:
    """The wire's lower limit of an all-reduce in µs; None where no wire was measured."""
    if not rate_gbs:
        return None
    return 2 * (world_size - 1) / world_size * nbytes / (rate_gbs * 1e3)


def bandwidths(rank: Rank) -> tuple[dict[str, float], dict[str, str]]:
    """GB/s by name, and what could not be measured with its reason; the same on all ranks."""
    home = rank.device
    steps: dict[str, tuple[torch.device, tuple[int, ...]]] = {LOCAL: (home, (0,))}
    if home.type == "cuda" and torch.cuda.device_count() > 1:
        far = torch.device("cuda", 1 - rank.rank if rank.rank < 2 else 0)
        steps |= {ONE_WAY: (far, (0,)), BOTH_WAYS: (far, (0, 1))}
    rates, left_out = {}, {}
    for name, (target, movers) in steps.items():
        copy, reason = rank.attempt(partial(_prepare, home, target, rank.rank in movers))
        if reason:
            left_out[name] = reason
            continue
        rate = copy() if copy else None
        rates[name] = min(r for r in rank.gather(rate) if r is not None)
    return rates, left_out


def _prepare(home: torch.device, target: torch.device, moves: bool) -> Callable[[], float] | None:
    """What measures GB/s from home to target, warmed up; None for a rank that does not move."""
    if not moves:
        return None
    nbytes, copies = COPIES[home.type]
    source = torch.randint(256, (nbytes,), dtype=torch.uint8, device=home)
    out = torch.empty(nbytes, dtype=torch.uint8, device=target)
    _copy(out, source, 1)
    return lambda: nbytes * copies / _copy(out, source, copies) * 1e-9


def _copy(out: Tensor, source: Tensor, copies: int) -> float:
    start = time.perf_counter()
    for _ in range(copies):
        out.copy_(source, non_blocking=True)
    for x in (source, out):
        if x.device.type == "cuda":
            torch.cuda.synchronize(x.device)
    return time.perf_counter() - start
