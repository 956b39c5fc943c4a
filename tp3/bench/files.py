"""A report as files: <out>/<theme>_<hardware>_<date>.md and .json, and .png with matplotlib."""

from __future__ import annotations

import importlib
import json
import re
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tp3.bench.report import Report, markdown

THEME = "allreduce"


def check_hardware(name: str) -> str:
    """`name` if it can be part of a file name; "_" separates the parts."""
    if not re.fullmatch(r"[A-Za-z0-9.+-]+", name):
        raise ValueError(f"hardware is {name!r}; allowed: letters, digits, '.', '+' and '-'")
    return name


def as_json(report: Report) -> str:
    return json.dumps({"theme": THEME, "title": report.title, **asdict(report)}, indent=1)


def write(report: Report, out: Path, hardware: str) -> list[Path]:
    """Write the files and return their paths; those of the same hardware and day are replaced."""
    out.mkdir(parents=True, exist_ok=True)
    stem = f"{THEME}_{check_hardware(hardware)}_{report.date}"
    paths = [out / f"{stem}.md", out / f"{stem}.json"]
    for path, text in zip(paths, (markdown(report), as_json(report))):
        path.write_text(text)
    if find_spec("matplotlib"):
        paths.append(out / f"{stem}.png")
        _plot(report, paths[-1])
    return paths


def _plot(report: Report, path: Path) -> None:
    modes = report.plan.modes
    figure: Any = importlib.import_module("matplotlib.figure").Figure(figsize=(6 * len(modes), 5))
    for axes, mode in zip(figure.subplots(1, len(modes), squeeze=False)[0], modes):
        rows = [row for row in report.rows if row.mode == mode]
        for name in dict.fromkeys(name for row in rows for name in row.us):
            shown = [(row.nbytes >> 10, row.us[name]) for row in rows if name in row.us]
            low = [q.median - q.low for _, q in shown]
            high = [q.high - q.median for _, q in shown]
            sizes, medians = [kib for kib, _ in shown], [q.median for _, q in shown]
            axes.errorbar(sizes, medians, yerr=(low, high), marker="o", capsize=3, label=name)
        floors = [(row.nbytes >> 10, row.floor_us) for row in rows if row.floor_us]
        if floors:
            axes.plot(*zip(*floors), linestyle="--", color="grey", label="wire floor")
        axes.set(title=mode, xlabel="KiB", ylabel="µs per call", xscale="log", yscale="log")
        axes.legend()
    figure.suptitle(report.title)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
