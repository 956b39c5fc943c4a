"""Tiny and real configs of grouped-query families; what their rules expect of a checkpoint.

The tiny models are random ones of Transformers, saved as it saves them; their sizes are chosen so
that no two dimensions are equal by chance. The real configs are excerpts of the Hub's.
"""

from __future__ import annotations

import json
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tp3.pad.extent import spread_of
from tp3.pad.model import HeadAxes, Model, Rule, Units
from tp3.pad.planner import plan
from tp3.pad.spread import Spread, kept

DATA = Path(__file__).parent / "data"
TINY: dict[str, dict[str, Any]] = json.loads((DATA / "gqa_tiny.json").read_text())
REAL: dict[str, dict[str, Any]] = json.loads((DATA / "gqa_real.json").read_text())

Shapes = dict[str, tuple[int, ...]]


def stock_axes(model: Model) -> dict[str, Spread]:
    sizes: dict[str, Spread] = {}
    for axis in model.axes:
        if isinstance(axis, HeadAxes):
            sizes |= {axis.names[0]: kept(axis.q), axis.names[1]: kept(axis.kv)}
        else:
            sizes[axis.name] = kept(axis.count)
        if isinstance(axis, Units):
            sizes |= {name: kept(axis.count * each) for name, each in axis.tied.items()}
    return sizes


def expected(model: Model) -> dict[str, list[tuple[Rule, int | None, tuple[int, ...]]]]:
    """For each name the rules that have it, its layer and its shape."""
    axes, found = stock_axes(model), defaultdict(list)
    for rule in model.rules:
        for layer in model.places(rule):
            suffix = model.suffix_in(layer)
            here = {name: axes.get(name + suffix, spread) for name, spread in axes.items()}
            sizes = model.sizes_in(layer)
            shape = tuple(spread_of(dim, sizes, here).stock for dim in rule.dims)
            name = rule.pattern.replace("*", str(layer)) if shape else rule.pattern
            for expert in range(model.experts if "#" in name else 1):
                found[name.replace("#", str(expert))].append((rule, layer, shape))
    return found


def complaints(model: Model, tensors: Shapes) -> list[str]:
    """What a checkpoint and the rules of its model do not agree on."""
    rules, told = expected(model), []
    covered = [name.removesuffix("**") for name in rules if name.endswith("**")]
    for name, shape in tensors.items():
        if name in rules:
            (*_, want) = rules[name][0]
            if len(rules[name]) > 1 or want != shape:
                told.append(f"{name} {shape}: {len(rules[name])} rules, {want}")
        elif not any(name.startswith(start) for start in covered):
            told.append(f"{name} {shape}: no rule")
    stands_in = defaultdict(list)
    for name, ((rule, layer, _), *_) in rules.items():
        if rule.instead:
            stands_in[rule.instead, layer].append(name in tensors)
    for name, ((rule, layer, _), *_) in rules.items():
        others = stands_in.get((rule.pattern, layer))
        if name not in tensors and not rule.spare and not (others and all(others)):
            told.append(f"{name}: missing")
    return told


def saved(config: dict[str, Any], folder: Path) -> tuple[dict[str, Any], Shapes]:
    """The config and the tensors of a random model, as Transformers saves them."""
    transformers = pytest.importorskip("transformers")
    from safetensors import safe_open

    if config["model_type"] not in transformers.CONFIG_MAPPING:
        pytest.skip(f"this Transformers has no {config['model_type']}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        built = transformers.AutoConfig.for_model(**config)
        kind = transformers.AutoModelForCausalLM
        if "vision_config" in config:
            kind = transformers.AutoModelForImageTextToText
        kind.from_config(built).save_pretrained(folder)
    tensors: Shapes = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                tensors[name] = tuple(opened.get_slice(name).get_shape())
    return json.loads((folder / "config.json").read_text()), tensors


def padded(config: dict[str, Any], tp: int, *axes: str, **asked: Any) -> list[int]:
    sizes = plan(config, tp=tp, **asked).padded_sizes
    return [sizes[axis] for axis in axes]


HEADS = ("q_heads", "kv_heads")


def llama(q: int, kv: int, head_dim: int, width: int, vocab: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": 5120,
        "num_attention_heads": q,
        "num_key_value_heads": kv,
        "head_dim": head_dim,
        "intermediate_size": width,
        "vocab_size": vocab,
        "num_hidden_layers": 5,
        **more,
    }
