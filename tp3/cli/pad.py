"""`tp3 pad`: a padded copy of a checkpoint."""

from __future__ import annotations

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

from tp3.cli.source import read_source


@click.command()
@click.argument("src")
@click.argument("dst")
@click.option("--tp", default=3, show_default=True, help="Tensor-parallel size.")
@click.option("--also-tp", type=int, multiple=True, help="Another size that must do; repeatable.")
@click.option("--strategy", default="auto", show_default=True, help="As in `tp3 plan`.")
def pad(src: str, dst: str, tp: int, also_tp: tuple[int, ...], strategy: str) -> None:
    """Write a padded copy of the checkpoint folder SRC to DST, which must not exist.

    Files that need no padding are hard-linked, so write to neither copy in place. An interrupted
    run leaves DST.partial; the same command goes on from there.
    """
    from tp3.pad.corrections import eps_factors
    from tp3.pad.offline import pad_checkpoint
    from tp3.pad.planner import plan
    from tp3.pad.standin import refused, stand_in

    config = read_source(src)
    planned = plan(config, tp=tp, also_tp=also_tp, strategy=strategy)
    columns = (BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    console = Console(stderr=True)
    quiet = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=quiet) as bar:
        task = bar.add_task("", total=None)
        done = pad_checkpoint(
            src,
            dst,
            config,
            planned,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    for line in done.lines:
        click.echo(line)
    for name in done.left_out:
        click.echo(f"left out, weights that no index names: {name}", err=True)
    padded = stand_in(planned.padded_config(config))
    if refused(padded):
        click.echo("Transformers refuses this config; an engine must override it", err=True)
    elif padded.get("model_type") != config.get("model_type"):
        click.echo("config.json says mistral: Transformers refuses it as llama", err=True)
    for name in eps_factors(planned.model, planned.spreads):
        click.echo(f"the host must scale the eps of {name} by norm_eps_factors", err=True)
    click.echo(
        f"{dst}: {done.written} files written, {done.resumed} kept from before, "
        f"{done.linked} linked"
    )
