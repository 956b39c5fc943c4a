"""`dist.all_reduce` of r4d and its peers in one run: start the ranks, collect what they found."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import date, timedelta

import torch
import torch.distributed as dist

from tp3.bench.gate import fault_of, judge, rank_data
from tp3.bench.machine import hardware, versions
from tp3.bench.peers import ENV, Peer, set_up
from tp3.bench.plan import Plan
from tp3.bench.ranks import Rank
from tp3.bench.report import Report, Row, row
from tp3.bench.timing import TURNS, EagerTurn, measure
from tp3.bench.wire import BOTH_WAYS, bandwidths, floor_us
from tp3.comm.launch import launch

SHARING_RANKS = 3


class WrongSum(RuntimeError):
    """r4d's sum did not pass the gate: nothing is reported."""


@dataclass
class Found:
    """What one rank found; all but the seconds are the same on every rank."""

    hardware: str
    versions: dict[str, str]
    shared: bool
    rates: dict[str, float] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    seconds: dict[tuple[str, int], dict[str, list[float]]] = field(default_factory=dict)
    fault: str = ""


def default_device() -> str:
    return "cuda" if torch.cuda.device_count() else "cpu"


def default_world_size(device: str) -> int:
    """A rank for every GPU; three on a CPU or on a lone GPU, which they share."""
    gpus = torch.cuda.device_count() if device == "cuda" else 0
    return gpus if gpus > 1 else SHARING_RANKS


def run(plan: Plan) -> Report:
    """Measure. WrongSum if r4d fails the gate; a rank that fails otherwise is launch's error."""
    on_gpus = plan.device == "cuda"
    if on_gpus and not torch.cuda.device_count():
        raise ValueError("device is 'cuda', but torch finds no GPU; allowed here: cpu")
    ranks: list[Found] = launch(
        rank_main,
        plan.world_size,
        plan,
        start="spawn" if on_gpus else "fork",
        device="cuda" if on_gpus else "cpu",
        timeout=plan.timeout,
        env=ENV,
    )
    first = ranks[0]
    if first.fault:
        raise WrongSum(first.fault)
    rate = None if first.shared else first.rates.get(BOTH_WAYS)
    rows: list[Row] = [
        row(
            mode,
            nbytes,
            calls=plan.calls(mode, nbytes),
            floor_us=floor_us(nbytes, plan.world_size, rate),
            seconds=[rank.seconds[mode, nbytes] for rank in ranks],
        )
        for mode in plan.modes
        for nbytes in plan.sizes
    ]
    return Report(
        date=str(date.today()),
        plan=plan,
        hardware=first.hardware,
        versions=first.versions,
        ranks_share_a_gpu=first.shared,
        rates_gbs=first.rates,
        left_out=first.left_out,
        rows=rows,
    )


def rank_main(rank_index: int, world_size: int, plan: Plan) -> Found:
    gpus = torch.cuda.device_count() if plan.device == "cuda" else 0
    device = torch.device("cuda", torch.cuda.current_device()) if gpus else torch.device("cpu")
    rank = Rank(
        rank_index,
        world_size,
        device,
        getattr(torch, plan.dtype),
        dist.new_group(backend="gloo", timeout=timedelta(seconds=plan.timeout)),
        shared=0 < gpus < world_size,
    )
    found = Found(hardware(plan.device), versions(plan.device), rank.shared)
    found.rates, found.left_out = bandwidths(rank)
    peers, absent = set_up(rank, plan.room_bytes)
    found.left_out |= absent
    for nbytes in plan.sizes:
        numel = nbytes // rank.dtype.itemsize
        xs = torch.stack([rank_data(r, numel, rank.dtype) for r in range(world_size)]).to(device)
        for mode in plan.modes:
            turns = _turns(rank, mode, plan.calls(mode, nbytes), peers, xs, found)
            if found.fault:
                return found
            found.seconds[mode, nbytes] = measure(turns, plan.repeats)
    rank.wait()
    rank.gather(None)
    return found


def _turns(
    rank: Rank, mode: str, calls: int, peers: dict[str, Peer], xs: torch.Tensor, found: Found
) -> dict[str, EagerTurn]:
    """The turns of this size whose sums hold; the others go into `found`."""
    size = xs[0].nbytes >> 10
    turns = {}
    for name, peer in peers.items():

        def build(peer: Peer = peer) -> EagerTurn:
            return TURNS[mode](rank, peer, xs[rank.rank], calls)

        turn, fault = (build(), "") if peer.exact else rank.attempt(build)
        if turn is not None:
            turn.fill()
            verdict = judge(rank.rank, turn.run(), xs, exact=peer.exact)
            fault = fault_of(rank.gather(verdict), exact=peer.exact)
        if turn is not None and not fault:
            turns[name] = turn
        elif peer.exact:
            found.fault = f"{name}, {size} KiB of {str(rank.dtype)[6:]}, {mode}: {fault}"
            return {}
        else:
            found.left_out[f"{name}, {mode}, {size} KiB"] = fault
    return turns
