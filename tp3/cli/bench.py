"""`tp3 bench`: measure against the peers that are there, and show the rows that lose too."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table

from tp3.bench.plan import DTYPES, KIB, MODES

if TYPE_CHECKING:
    from tp3.bench.report import Report


@click.group()
def bench() -> None:
    """Measure r4d against the peers that are installed, in turns, in one run."""


@bench.command()
@click.option("--world-size", type=int, help="Number of ranks.  [default: number of GPUs, or 3]")
@click.option("--device", help=f"{'/'.join(MODES)}  [default: cuda where there is a GPU]")
@click.option("--dtype", default=DTYPES[0], show_default=True, help="/".join(DTYPES))
@click.option(
    "--kib", default=",".join(map(str, KIB)), show_default=True, help="KiB on a rank, with commas."
)
@click.option("--mode", default="", help="graph,eager  [default: all that the device has]")
@click.option("--repeats", default=21, show_default=True, help="Turns of each peer that count.")
@click.option("--timeout", default=300.0, show_default=True, help="Seconds for the whole run.")
@click.option("--write", "name", metavar="HARDWARE", help="Write files named after HARDWARE.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("benchmarks/results"),
    show_default=True,
    help="Folder of the files.",
)
@click.option("--json", "json_wanted", is_flag=True, help="Print JSON instead of tables.")
def allreduce(
    world_size: int | None,
    device: str | None,
    dtype: str,
    kib: str,
    mode: str,
    repeats: int,
    timeout: float,
    name: str | None,
    out: Path,
    json_wanted: bool,
) -> None:
    """all_reduce of r4d against NCCL and torch symmetric memory; on a CPU against Gloo.

    Exit code 0 when everything was measured, 1 when r4d's sum was wrong, 2 for bad input.
    """
    from tp3.bench.allreduce import WrongSum, default_device, default_world_size, run
    from tp3.bench.files import as_json, check_hardware, write
    from tp3.bench.plan import Plan

    device = default_device() if device is None else device
    plan = Plan(
        world_size=default_world_size(device) if world_size is None else world_size,
        device=device,
        dtype=dtype,
        kib=tuple(_number(word) for word in _words(kib)),
        modes=tuple(_words(mode)),
        repeats=repeats,
        timeout=timeout,
    )
    if name is not None:
        check_hardware(name)
    progress = Console(stderr=True)
    with progress.status(f"measuring on {plan.world_size} ranks"):
        try:
            report = run(plan)
        except WrongSum as error:
            raise click.ClickException(f"wrong sum, nothing measured: {error}") from error
    if json_wanted:
        click.echo(as_json(report))
    else:
        _print(report)
    for path in write(report, out, name) if name else []:
        progress.print(f"wrote {path}", soft_wrap=True)


def _words(text: str) -> list[str]:
    return [word for word in re.split(r"[,\s]+", text) if word]


def _number(word: str) -> int:
    if not word.isdecimal():
        raise ValueError(f"a size is {word!r}; it must be a whole number of KiB")
    return int(word)


def _print(report: Report) -> None:
    from tp3.bench.report import head, losses, table

    for line in head(report):
        click.echo(line)
    for mode in report.plan.modes:
        titles, cells = table(report, mode)
        shown = Table(title=f"{report.title}, {mode}")
        for title in titles:
            shown.add_column(title, justify="right")
        for row in cells:
            shown.add_row(*row)
        Console().print(shown)
        click.echo(losses(report, mode))
