"""`tp3 verify`: the padded model against the stock one in Transformers, on the CPU."""

from __future__ import annotations

import json

import click

from tp3.cli.source import read_source


@click.command()
@click.argument("model")
@click.option("--tp", default=3, show_default=True, help="Tensor-parallel size.")
@click.option("--layers", type=int, help="Only the first layers.  [default: all; random: 2]")
@click.option("--strategy", default="auto", show_default=True, help="As in `tp3 plan`.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def verify(model: str, tp: int, layers: int | None, strategy: str, as_json: bool) -> None:
    """Compare the logits of MODEL, padded, with its own, in fp32; audit that the padding is zero.

    MODEL is a checkpoint folder, or a config.json or a hub id for random weights. Exit code 0 when
    the difference is rounding, 1 when it is more, 2 for bad input.
    """
    from tp3.pad.verify import verify as compare

    found = compare(model, read_source(model), tp=tp, layers=layers, strategy=strategy)
    if as_json:
        record = {
            "tp": tp,
            "layers": found.layers,
            "max_abs_difference": found.apart,
            "error_to_fp64": found.error,
            "bound": found.bound,
            "padded_entries": found.zeros,
            "wrong": list(found.wrong),
            "max_abs_tail": found.tail,
            "ok": found.ok,
        }
        click.echo(json.dumps(record, indent=2))
    else:
        click.echo(f"{found.layers} layers on {tp} ranks, logits in fp32")
        click.echo(f"max |padded - stock|: {found.apart:.2e}")
        click.echo(f"max error to fp64: {found.error:.2e}, allowed 2 × {found.rounding:.2e}")
        click.echo(f"padded entries: {found.zeros}, in {len(found.wrong)} tensors not as planned")
        for name in found.wrong:
            click.echo(f"Error: tensor {name} is not what the plan says", err=True)
        if found.tail:
            click.echo(f"Error: a padded token has the logit {found.tail}", err=True)
    if not found.ok:
        raise SystemExit(1)
