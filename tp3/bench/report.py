"""What a run found, as records and as text. All figures are µs per call."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tp3.bench.plan import Plan

# Column title, and the peers of which the fastest is what r4d's time is divided by.
RATIOS = (
    ("r4d/nccl", ("nccl",)),
    ("r4d/best symm", ("symm one-shot", "symm two-shot")),
    ("r4d/gloo", ("gloo",)),
)
ABSENT = "–"


@dataclass(frozen=True)
class Quartiles:
    low: float
    median: float
    high: float


@dataclass(frozen=True)
class Row:
    """One size in one mode. us: the rank with the largest median; ranks_us: all, in rank order."""

    mode: str
    nbytes: int
    calls: int
    floor_us: float | None
    us: dict[str, Quartiles]
    ranks_us: dict[str, list[Quartiles]]
    ratios: dict[str, float]


@dataclass(frozen=True)
class Report:
    """left_out: what was not measured, and why."""

    date: str
    plan: Plan
    hardware: str
    versions: dict[str, str]
    ranks_share_a_gpu: bool
    rates_gbs: dict[str, float]
    left_out: dict[str, str]
    rows: list[Row]

    @property
    def title(self) -> str:
        return f"All-reduce of {self.plan.dtype}, {self.plan.world_size} ranks on {self.hardware}"


def row(
    mode: str,
    nbytes: int,
    *,
    calls: int,
    floor_us: float | None,
    seconds: Sequence[Mapping[str, Sequence[float]]],
) -> Row:
    """A row from the seconds per call of each rank, peer and repeat."""
    ranks_us = {name: [_quartiles(rank[name]) for rank in seconds] for name in seconds[0]}
    us = {name: max(ranks, key=lambda q: q.median) for name, ranks in ranks_us.items()}
    return Row(mode, nbytes, calls, floor_us, us, ranks_us, _ratios(us))


def head(report: Report) -> list[str]:
    """The lines above the tables: versions, limits, who is missing and why."""
    plan = report.plan
    rates = ", ".join(f"{name} {rate:.0f} GB/s" for name, rate in report.rates_gbs.items())
    lines = [
        ", ".join(f"{name} {version}" for name, version in report.versions.items()) + ".",
        f"Copies: {rates or 'not measured'} (bytes copied, counted once).",
        f"Slowest rank's median (quartiles) over {plan.repeats} repeats, µs per call, the peers in "
        "turns.",
    ]
    if plan.device == "cuda":
        lines.append("NVLink multicast is off for all peers.")
    if any(row.floor_us for row in report.rows):
        lines.append("Wire floor: 2(W-1)/W of the bytes at the rate of both ways at once.")
    if report.ranks_share_a_gpu:
        lines.append("Ranks share a GPU: no wire between them, no wire floor.")
    return lines + [f"Left out: {what}: {why}." for what, why in report.left_out.items()]


def table(report: Report, mode: str) -> tuple[list[str], list[list[str]]]:
    """Column titles and cells of one mode."""
    rows = [row for row in report.rows if row.mode == mode]
    peers = list(dict.fromkeys(name for row in rows for name in row.us))
    ratios = [title for title, _ in RATIOS if any(title in row.ratios for row in rows)]
    floor = ["wire floor"] if any(row.floor_us for row in rows) else []
    cells = [
        [str(row.nbytes >> 10)]
        + [_spread(row.us.get(name)) for name in peers]
        + [f"{row.ratios[title]:.2f}" if title in row.ratios else ABSENT for title in ratios]
        + [_figure(row.floor_us) for _ in floor]
        for row in rows
    ]
    return ["KiB", *peers, *ratios, *floor], cells


def losses(report: Report, mode: str) -> str:
    """A sentence on the rows in which a peer is faster."""
    rows = [row for row in report.rows if row.mode == mode and row.ratios]
    lost = [f"{row.nbytes >> 10}" for row in rows if max(row.ratios.values()) > 1]
    where = f" ({', '.join(lost)} KiB)" if lost else ""
    return f"A peer is faster than r4d in {len(lost)} of {len(rows)} rows{where}."


def markdown(report: Report) -> str:
    lines = [f"# {report.title}", "", *(f"- {line}" for line in head(report))]
    for mode in report.plan.modes:
        titles, cells = table(report, mode)
        lines += ["", f"## {mode}", "", _line(titles), "|" + "---|" * len(titles)]
        lines += [_line(line) for line in cells] + ["", losses(report, mode)]
    return "\n".join(lines) + "\n"


def _ratios(us: Mapping[str, Quartiles]) -> dict[str, float]:
    found = {}
    for title, names in RATIOS:
        medians = [us[name].median for name in names if name in us]
        if medians:
            found[title] = us["r4d"].median / min(medians)
    return found


def _quartiles(seconds: Sequence[float]) -> Quartiles:
    return Quartiles(*(q * 1e6 for q in statistics.quantiles(seconds, n=4)))


def _spread(quartiles: Quartiles | None) -> str:
    if quartiles is None:
        return ABSENT
    low, median, high = map(_figure, (quartiles.low, quartiles.median, quartiles.high))
    return f"{median} ({low}–{high})"


def _figure(us: float | None) -> str:
    return ABSENT if us is None else f"{us:.1f}" if us < 100 else f"{us:.0f}"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
