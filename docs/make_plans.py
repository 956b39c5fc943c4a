"""Writes docs/plans.md: how each config of a folder is padded for 2 to 8 ranks.

    python docs/make_plans.py FOLDER > docs/plans.md

FOLDER holds ``org--name_config.json`` files, or a folder with a ``config.json`` for each model.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tp3.pad.model import HeadAxes, Model, Units, Vocabulary, Width
from tp3.pad.planner import Plan, plan

SIZES = range(2, 9)
CONFIG, QUANTISATION = "config.json", "hf_quant_config.json"
TITLES = (
    "ranks",
    "strategy",
    "heads",
    "widths",
    "vocabulary",
    "MiB per rank",
    "KV bytes per token",
    "overhead",
)
HEAD = """# Plans

What `tp3 plan` makes of the configs of popular models, without further constraints. Written by
`docs/make_plans.py`.

Heads are query/KV heads, or the name of another unit of heads and how many; sizes that differ from
the trained ones are bold. MiB per rank are weights, prediction layers and vision towers left out;
KV bytes per token are one rank's, two to an entry. Overhead is what a rank holds more than an even
share of the trained weights.
"""


def configs(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and config of each model, in the order of their names, the quantisation put in."""
    for file in sorted(folder.rglob("*" + CONFIG)):
        if file.name.endswith(QUANTISATION):
            continue
        config = json.loads(file.read_text(encoding="utf-8"))
        beside = file.with_name(file.name.removesuffix(CONFIG) + QUANTISATION)
        if beside.exists() and not config.get("quantization_config"):
            content = json.loads(beside.read_text(encoding="utf-8"))
            quantisation = content.get("quantization", content)
            config["quantization_config"] = {"quant_method": "modelopt", **quantisation}
        named = file.name.removesuffix(CONFIG).rstrip("_") or file.parent.name
        yield named.replace("--", "/"), config


def body(config: Mapping[str, Any]) -> str:
    """The table of a model; a refusal that all sizes share is said once."""
    found: dict[int, Plan | str] = {}
    for size in SIZES:
        try:
            found[size] = plan(config, tp=size)
        except ValueError as error:
            found[size] = str(error)
    plans = [each for each in found.values() if isinstance(each, Plan)]
    if not plans and len(set(found.values())) == 1:
        return f"Refused: {found[SIZES[0]]}.\n"
    kind = f"`{config.get('model_type')}`" + (f", {plans[0].format.name}" if plans else "")
    out = [kind, "", _row(TITLES), _row("---" for _ in TITLES)]
    if plans:
        out.append(_row(("trained", "", *_sizes(plans[0].model, plans[0], trained=True))))
    for size, each in found.items():
        if isinstance(each, str):
            out.append(_row((f"{size}", f"refused: {each}")))
        else:
            out.append(_row((f"{size}", each.strategy, *_sizes(each.model, each), *_bytes(each))))
    notes = dict.fromkeys(note for each in plans for note in each.notes)
    return "\n".join([*out, "", *(f"Note: {note}.\n" for note in notes)])


def _sizes(model: Model, planned: Plan, *, trained: bool = False) -> tuple[str, str, str]:
    """Heads, widths, vocabulary."""
    axes = {axis.name: axis for axis in planned.axes}

    def size(name: str) -> str:
        axis = axes[name]
        if trained or axis.padded == axis.stock:
            return f"{axis.stock}"
        return f"**{axis.padded}**"

    def named(names: Iterable[str]) -> str:
        return ", ".join(f"{name} {size(name)}" for name in names)

    heads, widths, vocabulary = [], [], []
    for axis in model.axes:
        if isinstance(axis, HeadAxes):
            pair = "/".join(size(name) for name in axis.names)
            heads.append(f"{axis.suffix.removeprefix('.')} {pair}".strip())
        elif isinstance(axis, Units):
            heads.append(named((axis.name, *axis.tied)))
        elif isinstance(axis, Width):
            widths.append(named((axis.name, *axis.tied)))
        elif isinstance(axis, Vocabulary):
            vocabulary.append(size(axis.name))
    return ", ".join(heads), ", ".join(widths), ", ".join(vocabulary)


def _bytes(planned: Plan) -> tuple[str, str, str]:
    ledger = planned.ledger
    return (
        f"{ledger.weight_bytes / 2**20:,.0f}",
        f"{ledger.kv_bytes_per_token:,}",
        f"{ledger.overhead:.1%}",
    )


def _row(cells: Iterable[str]) -> str:
    """A row of a table, filled up to its width."""
    texts = [cell.replace("|", "\\|") for cell in cells]
    return "| " + " | ".join(texts + [""] * (len(TITLES) - len(texts))) + " |"


def document(folder: Path) -> str:
    """All tables; models whose tables are alike share one."""
    alike: dict[str, list[str]] = {}
    for name, config in configs(folder):
        alike.setdefault(body(config), []).append(name)
    parts = [HEAD, *(f"## {', '.join(names)}\n\n{text}" for text, names in alike.items())]
    return "\n".join(parts).rstrip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="The plans of a folder of configs, as Markdown.")
    parser.add_argument("folder", type=Path)
    print(document(parser.parse_args().folder), end="")


if __name__ == "__main__":
    main()
