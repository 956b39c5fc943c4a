"""`tp3 algorithms`: which algorithm carries a collective, and why the others do not."""

from __future__ import annotations

import json

import click
from rich.console import Console
from rich.table import Table

from tp3.comm.select import COLLECTIVES, DEVICES, Request, choose, explain
from tp3.comm.settings import Settings

SWEEP_BYTES = tuple(8 << 10 << 2 * i for i in range(8))


@click.command()
@click.option("--collective", default="all_reduce", show_default=True, help="/".join(COLLECTIVES))
@click.option("--world-size", default=3, show_default=True, help="Number of ranks.")
@click.option("--dtype", default="bfloat16", show_default=True)
@click.option(
    "--nbytes", default=80 << 10, show_default=True, help="Bytes of the tensor on a rank."
)
@click.option("--device", default=DEVICES[0], show_default=True, help="/".join(DEVICES))
@click.option("--hosts", default=1, show_default=True, help="Number of hosts the ranks are on.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def algorithms(
    collective: str,
    world_size: int,
    dtype: str,
    nbytes: int,
    device: str,
    hosts: int,
    as_json: bool,
) -> None:
    """Show every algorithm with its verdict on one call, and the choice by size."""

    def request(size: int) -> Request:
        return Request(
            collective=collective,
            world_size=world_size,
            dtype=dtype,
            nbytes=size,
            device=device,
            reach=device != "cpu" and hosts == 1,
            hosts=hosts,
            force=Settings.from_env().allreduce,
        )

    verdicts = explain(request(nbytes))
    chosen = choose(request(nbytes))
    by_size = {size: choose(request(size)).name for size in SWEEP_BYTES}
    if as_json:
        rows = [
            {"name": row.name, "what": row.what, "rejection": rejection, "chosen": row is chosen}
            for row, rejection in verdicts
        ]
        click.echo(json.dumps({"rows": rows, "by_nbytes": by_size}, indent=2))
        return
    where = f"{world_size} ranks, {hosts} host{'s' * (hosts > 1)}, {device}"
    table = Table(title=f"{collective} of {nbytes} bytes of {dtype} on {where}")
    for name in ("algorithm", "what", "world sizes", "exact", "verdict"):
        table.add_column(name)
    for row, rejection in verdicts:
        verdict = (
            "[green]runs[/]" if row is chosen else rejection or "fits, but an earlier row runs"
        )
        table.add_row(row.name, row.what, row.world_sizes, "yes" if row.exact else "no", verdict)
    console = Console()
    console.print(table)
    console.print(
        "by size: " + ", ".join(f"{size >> 10} KiB {name}" for size, name in by_size.items())
    )
