"""`tp3 smoke`: every collective, then a padded model, on what is there."""

from __future__ import annotations

import json
from typing import Any

import click
from rich.console import Console
from rich.table import Table


@click.command()
@click.option("--world-size", default=3, show_default=True, help="Number of ranks.")
@click.option("--device", default="cpu", show_default=True, help="Where the ranks run.")
@click.option("--model", "folder", help="A Transformers Llama checkpoint instead of a random one.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def smoke(world_size: int, device: str, folder: str | None, as_json: bool) -> None:
    """Run every collective and a padded model on WORLD_SIZE ranks and check what comes out.

    Exit code 0 when everything held, 1 when something did not, 2 for bad input.
    """
    from tp3.smoke.collectives import run_collectives
    from tp3.smoke.model import run_model

    if not 1 <= world_size <= 16:
        raise ValueError(f"world size must be in 1..16, got {world_size}")
    progress = Console(stderr=True)
    with progress.status("starting") as status:

        def tell(what: str) -> None:
            status.update(what)
            if not progress.is_terminal:
                progress.print(what)

        rows = run_collectives(world_size, device=device, progress=tell)
        rows += run_model(world_size, backend="r4d", device=device, folder=folder, progress=tell)
    failed = [row for row in rows if not row["ok"]]
    if as_json:
        record = {"world_size": world_size, "device": device, "ok": not failed, "rows": rows}
        click.echo(json.dumps(record, indent=2))
    else:
        Console().print(_table(rows, world_size, device))
        click.echo(f"{len(rows) - len(failed)} of {len(rows)} checks held")
    if failed:
        raise SystemExit(1)


def _table(rows: list[dict[str, Any]], world_size: int, device: str) -> Table:
    table = Table(title=f"tp3 smoke: {world_size} ranks on {device}, times in µs")
    for name, justify in (("check", "left"), ("", "left"), ("value", "right"), ("detail", "left")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for row in rows:
        value = row["value"]
        shown = f"{value:.3g}" if isinstance(value, float) and value < 10 else str(value)
        mark = "[green]ok[/]" if row["ok"] else "[red]FAILED[/]"
        table.add_row(row["check"], mark, shown, row["detail"])
    return table
