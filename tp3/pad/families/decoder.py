"""From a config to a ``Model``, for every decoder of grouped-query attention: what they share.

A ``Kin`` says in what a ``model_type`` departs from Llama; a family's file builds its rules and
gives them to ``decoder`` with the tags of its layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tp3.pad.families.config import Config
from tp3.pad.families.llama import NORMS
from tp3.pad.model import HeadAxes, Model, Rule, Tags, Vocabulary, Width

QK_NORM = {"": (), "head": ("qk_norm",), "width": ("qk_norm_width",)}


@dataclass(frozen=True)
class Kin:
    """How a ``model_type`` departs from Llama.

    A bias is "always", "never" or a config key, with "!" where it is there unless denied. qk_norm:
    "head", "width" or none; qk_norm_key: a flag in the config that it needs. fused: sections in one
    tensor, of "qkv" and "gate_up". tied: whether head and embedding are one where the config does
    not say. text: the folder of the config that describes the decoder. towers: what else a
    checkpoint holds, untouched.
    """

    qkv_bias: str = "never"
    o_bias: str = "never"
    mlp_bias: str = "never"
    qk_norm: str = ""
    qk_norm_key: str = ""
    qk_names: tuple[str, str] = ("q_norm", "k_norm")
    norms: tuple[str, ...] = NORMS
    fused: tuple[str, ...] = ()
    tied: bool = False
    text: str = ""
    root: str = "model."
    head: str = "lm_head.weight"
    towers: tuple[str, ...] = ()

    @property
    def layer(self) -> str:
        return self.root + "layers.*."


def nested(kin: Kin, *towers: str, outer: str = "model.language_model.") -> Kin:
    """The same decoder inside of a multimodal model that keeps its head at the top."""
    return replace(kin, text="text_config", root=outer, towers=towers)


def inside(kin: Kin, *towers: str) -> Kin:
    """The same decoder, with its head, inside of a multimodal model."""
    named = nested(kin, *towers, outer="language_model.model.")
    return replace(named, head="language_model.lm_head.weight")


def text_of(values: Mapping[str, Any], kin: Kin) -> Config:
    """The part of a config that describes the decoder."""
    return Config(values).folder(kin.text) if kin.text else Config(values)


def decoder(
    values: Mapping[str, Any],
    kin: Kin,
    rules: Iterable[Rule],
    *,
    widths: Mapping[str, str],
    layers: Iterable[Iterable[str]] = (),
    tags: Iterable[str] = (),
    sizes: Mapping[str, int] | None = None,
) -> Model:
    """The model of a config. widths: the config key of each width. layers: for each layer its tags;
    by default all have "attention", whose cache holds keys and values.
    """
    config = text_of(values, kin)
    q, kv, head_dim = config.heads()
    placed: tuple[Tags, ...] = tuple(frozenset(each) for each in layers)
    placed = placed or (frozenset({"attention"}),) * config.size("num_hidden_layers")
    model = Model(
        model_type=str(values["model_type"]),
        axes=(
            HeadAxes(q, kv, head_dim, layers=sum("attention" in each for each in placed)),
            *(Width(name, config.size(key)) for name, key in widths.items()),
            Vocabulary("vocab", config.size("vocab_size")),
        ),
        sizes={
            "hidden": config.size("hidden_size"),
            "head_dim": head_dim,
            "rotary": head_dim // 2,
            **(sizes or {}),
        },
        layers=placed,
        rules=(
            *_with_head(rules, kin.head, values),
            *(Rule(tower + "**", (), spare=True, plain=True) for tower in kin.towers),
        ),
        paths={
            "q_heads": (config.path("num_attention_heads"),),
            "kv_heads": (config.path("num_key_value_heads"),),
            "vocab": (config.path("vocab_size"),),
            **{name: (config.path(key),) for name, key in widths.items()},
        },
        tags=frozenset({*tags, *_tags(values, config, kin)}),
        experts=(sizes or {}).get("experts", 0),
        pins={config.path("head_dim"): head_dim},
        kv_entries={"attention": "2*kv_heads*head_dim"},
        notes=_notes(values),
    )
    return placed_rules(model)


def placed_rules(model: Model) -> Model:
    """The model without the rules that no layer has a tensor of."""
    rules = tuple(rule for rule in model.rules if any(True for _ in model.places(rule)))
    return replace(model, rules=rules)


def _with_head(rules: Iterable[Rule], head: str, values: Mapping[str, Any]) -> Iterable[Rule]:
    """The rules, the head quantised where the config says so; by default it is not."""
    quantised = Config(values).inner("quantization_config")
    named = quantised.inner("quantized_layers").values
    if quantised.values.get("lm_head") is not True and head.removesuffix(".weight") not in named:
        return rules
    return (replace(rule, plain=False) if rule.pattern == head else rule for rule in rules)


def _tags(values: Mapping[str, Any], config: Config, kin: Kin) -> Iterable[str]:
    for name in ("qkv_bias", "o_bias", "mlp_bias"):
        bias = getattr(kin, name)
        key, default = bias.rstrip("!"), bias.endswith("!")
        if key == "always" or (key != "never" and config.flag(key, default)):
            yield name
    if not kin.qk_norm_key or config.flag(kin.qk_norm_key):
        yield from QK_NORM[kin.qk_norm]
    outer = Config(values)
    places = [each for each in (outer, config) if each.has("tie_word_embeddings")]
    if not (places[0].flag("tie_word_embeddings") if places else kin.tied):
        yield "untied"


def _notes(values: Mapping[str, Any]) -> tuple[str, ...]:
    vision = values.get("vision_config")
    if not isinstance(vision, Mapping):
        return ()
    heads = vision.get("num_heads") or vision.get("num_attention_heads")
    told = f" ({heads} heads)" if heads else ""
    return (
        f"the vision tower{told} stays as trained: run it data-parallel where its heads do not "
        "divide by the ranks",
    )
