"""`tp3 check`: every tensor of a checkpoint against the plan, from the headers alone."""

from __future__ import annotations

import gc
import json

import click

from tp3.cli.source import read_source

MOST_SHOWN = 20


@click.command()
@click.argument("model")
@click.option("--tp", default=3, show_default=True, help="Tensor-parallel size.")
@click.option("--strategy", default="auto", show_default=True, help="As in `tp3 plan`.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def check(model: str, tp: int, strategy: str, as_json: bool) -> None:
    """Check every tensor of the checkpoint folder MODEL against its plan; reads no weights.

    Exit code 0 when each is padded or left alone on purpose, 2 otherwise.
    """
    from tp3.pad.check import check as compare
    from tp3.pad.headers import read_headers
    from tp3.pad.planner import plan

    gc.disable()  # nothing here is a cycle, and 100,000 entries would be walked through often
    try:
        headers = read_headers(model)
        found = compare(headers, plan(read_source(model), tp=tp, strategy=strategy))
    finally:
        gc.enable()
    if as_json:
        record = {
            "tp": tp,
            "covered": found.covered,
            "untouched": found.untouched,
            "errors": list(found.errors),
            "lines": list(found.lines),
        }
        click.echo(json.dumps(record, indent=2))
    elif not found.errors:
        for line in found.lines:
            click.echo(line)
    for sentence in found.errors[:MOST_SHOWN]:
        click.echo(f"Error: {sentence}", err=True)
    if len(found.errors) > MOST_SHOWN:
        click.echo(f"and {len(found.errors) - MOST_SHOWN} more errors", err=True)
    if found.errors:
        raise SystemExit(2)
    if not as_json:
        click.echo(f"{found.covered} tensors are padded, {found.untouched} are left alone")
