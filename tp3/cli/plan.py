"""`tp3 plan`: the sizes that let a model run at a tensor-parallel size, and what they cost."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

from tp3.cli.source import read_source

if TYPE_CHECKING:
    from tp3.pad.planner import Plan


@click.command()
@click.argument("path")
@click.option("--tp", default=3, show_default=True, help="Tensor-parallel size.")
@click.option("--also-tp", type=int, multiple=True, help="Another size that must do; repeatable.")
@click.option(
    "--strategy",
    default="auto",
    show_default=True,
    help="How heads are padded: auto, append, in-group, split-group.",
)
@click.option(
    "--local-multiple",
    "multiples",
    metavar="AXIS=K",
    multiple=True,
    help="A rank's share of AXIS must divide by K; repeatable.",
)
@click.option("--like", metavar="TARGET", help="Cache as many bytes per token and layer as TARGET.")
@click.option("--draft", metavar="PATH", help="Plan this drafter too, its cache like PATH's.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def plan(
    path: str,
    tp: int,
    also_tp: tuple[int, ...],
    strategy: str,
    multiples: tuple[str, ...],
    like: str | None,
    draft: str | None,
    as_json: bool,
) -> None:
    """Plan the padding of PATH: a checkpoint folder, a config.json, or a hub id.

    Exit code 0 when there is a plan, 2 when there is none.
    """
    from tp3.pad.planner import plan as make
    from tp3.pad.report import record

    layer_bytes = None
    if like is not None:
        layer_bytes = _bytes_per_layer(make(read_source(like), tp=tp, also_tp=also_tp), like)
    planned = make(
        read_source(path),
        tp=tp,
        also_tp=also_tp,
        strategy=strategy,
        local_multiple=_multiples(multiples),
        kv_bytes_per_layer=layer_bytes,
    )
    drafted = None
    if draft is not None:
        drafted = make(
            read_source(draft),
            tp=tp,
            also_tp=also_tp,
            kv_bytes_per_layer=_bytes_per_layer(planned, path),
        )
    if as_json:
        made = record(planned)
        if drafted is not None:
            made["draft"] = record(drafted)
        click.echo(json.dumps(made, indent=2))
        return
    show(planned, path)
    if drafted is not None and draft is not None:
        show(drafted, draft)


def show(planned: Plan, path: str) -> None:
    """The plan as a table, and what it costs."""
    from tp3.pad.report import TITLES, lines, rows

    table = Table(title=f"{path}: {planned.model.model_type} on {planned.tp} ranks")
    for title in TITLES:
        table.add_column(title, justify="right" if title in TITLES[1:4] else "left")
    for row in rows(planned):
        table.add_row(*row)
    Console().print(table)
    for line in lines(planned):
        click.echo(line)


def _bytes_per_layer(target: Plan, path: str) -> int:
    found: Mapping[int, int] = target.kv_bytes_per_layer
    sizes = sorted(set(found.values()))
    if len(sizes) != 1:
        text = " and ".join(str(size) for size in sizes) or "no"
        raise ValueError(f"{path} caches {text} bytes per token in its layers, not one number")
    return sizes[0]


def _multiples(pairs: tuple[str, ...]) -> dict[str, int]:
    made: dict[str, Any] = {}
    for pair in pairs:
        axis, _, number = pair.partition("=")
        if not axis or not number.isdecimal() or int(number) < 1:
            raise ValueError(f"a local multiple is AXIS=K with K of 1 or more, got {pair!r}")
        made[axis] = int(number)
    return made
