"""`tp3 smoke`: every collective, then a padded model, on what is there."""

from __future__ import annotations

import json
from typing import Any

import click
from rich.console import Console
from rich.table import Table


@click.command()
@click.option("--world-size", default=3, show_default=True, help="Number of ranks.")
@click.option(
    "--device", default="auto", show_default=True, help="cpu, cuda, or auto: GPUs if there are any."
)
@click.option("--mps", is_flag=True, help="Share GPUs through an MPS daemon of its own.")
@click.option("--model", "folder", help="A Transformers Llama checkpoint instead of a random one.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def smoke(world_size: int, device: str, mps: bool, folder: str | None, as_json: bool) -> None:
    """Run every collective and a padded model on WORLD_SIZE ranks and check what comes out.

    Ranks may outnumber the GPUs; they then take turns, or with --mps run at the same time.

    Exit code 0 when everything held, 1 when something did not, 2 for bad input.
    """
    from tp3.smoke.collectives import run_collectives
    from tp3.smoke.model import run_model
    from tp3.smoke.repeats import run_repeats
    from tp3.smoke.site import open_site

    if not 1 <= world_size <= 16:
        raise ValueError(f"world size must be in 1..16, got {world_size}")
    progress = Console(stderr=True)
    with open_site(device, mps=mps) as site, progress.status("starting") as status:

        def tell(what: str) -> None:
            status.update(what)
            if not progress.is_terminal:
                progress.print(what)

        rows = run_collectives(world_size, site=site, progress=tell)
        rows += run_repeats(world_size, site=site, progress=tell)
        rows += run_model(world_size, backend="r4d", site=site, folder=folder, progress=tell)
    failed = [row for row in rows if not row["ok"]]
    if as_json:
        record = {
            "world_size": world_size,
            "device": site.device,
            "num_gpus": site.num_gpus,
            "mps": bool(site.mps_env),
            "ok": not failed,
            "rows": rows,
        }
        click.echo(json.dumps(record, indent=2))
    else:
        Console().print(_table(rows, f"{world_size} ranks on {site}"))
        click.echo(f"{len(rows) - len(failed)} of {len(rows)} checks held")
    if failed:
        raise SystemExit(1)


def _table(rows: list[dict[str, Any]], where: str) -> Table:
    table = Table(title=f"tp3 smoke: {where}; times in µs")
    for name, justify in (("check", "left"), ("", "left"), ("value", "right"), ("detail", "left")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for row in rows:
        value = row["value"]
        shown = f"{value:.3g}" if isinstance(value, float) and value < 10 else str(value)
        mark = "[green]ok[/]" if row["ok"] else "[red]FAILED[/]"
        table.add_row(row["check"], mark, shown, row["detail"])
    return table
