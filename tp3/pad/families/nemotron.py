"""Nemotron-H and Nemotron-3: a layer is one of Mamba-2 (M), attention (*), MLP (-), experts (E).

The MLPs are not gated: relu(x)² of one projection. The experts of Nemotron-3-Super work on
``moe_latent_size`` entries. Names and shapes: Transformers 5.24, ``models/nemotron_h``; prediction
layers: vLLM, ``models/nemotron_h_mtp.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from tp3.pad.families.config import Config
from tp3.pad.families.latent import count, paths
from tp3.pad.families.llama import NO_LOGIT, NO_TOKEN, NO_WIDTH, attention
from tp3.pad.families.mamba import mamba_axis, mamba_sizes, mixer
from tp3.pad.model import HeadAxes, Model, Rule, Vocabulary, Width

KINDS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
# Transformers 5 writes the kinds out, under either of two names.
WORDS = {
    **{kind: kind for kind in KINDS.values()},
    "linear_attention": "mamba",
    "full_attention": "attention",
}
NO_SQUARE = "relu(0)² = 0"


def read(values: Mapping[str, Any]) -> Model:
    """The model of a Nemotron-H config."""
    config = Config(values)
    q, kv, head_dim = config.heads()
    kinds = _kinds(config, "hybrid_override_pattern", "layers_block_type")
    layers = config.size("num_hidden_layers", len(kinds))
    if len(kinds) != layers:
        raise ValueError(f"hybrid_override_pattern must name {layers} layers, got {len(kinds)}")
    drafts = count(config, "num_nextn_predict_layers")
    draft = _kinds(config, "mtp_hybrid_override_pattern", "mtp_layers_block_type") if drafts else []
    has = {*kinds, *draft}
    groups = config.size("n_groups")
    latent = count(config, "moe_latent_size")
    number = config.size("n_routed_experts") if "moe" in has else 0
    widths = {
        "mlp": {"intermediate": "intermediate_size"},
        "moe": {
            "moe_intermediate": "moe_intermediate_size",
            "shared_intermediate": "moe_shared_expert_intermediate_size",
        },
    }
    keys = {name: key for kind in has & set(widths) for name, key in widths[kind].items()}
    mamba = mamba_axis(config.size("mamba_num_heads"), groups)
    return Model(
        model_type=str(values["model_type"]),
        axes=(
            HeadAxes(q, kv, head_dim, layers=kinds.count("attention")),
            mamba,
            *(Width(name, config.size(key)) for name, key in sorted(keys.items())),
            Vocabulary("vocab", config.size("vocab_size")),
        ),
        sizes={
            "hidden": config.size("hidden_size"),
            "head_dim": head_dim,
            **mamba_sizes(config, "mamba_head_dim", "ssm_state_size", "conv_kernel"),
            **({"experts": number} if number else {}),
            **({"latent": latent} if latent else {}),
        },
        layers=tuple(frozenset({kind}) for kind in kinds),
        rules=(
            *_frame(),
            *_layer("backbone.layers.*.", sorted(has), groups, latent),
            *(_drafts(draft * drafts, groups, latent)),
        ),
        paths={
            **paths(
                config,
                q_heads="num_attention_heads",
                kv_heads="num_key_value_heads",
                mamba_heads="mamba_num_heads",
                vocab="vocab_size",
                **keys,
            ),
            **({"mamba_groups": (config.path("n_groups"),)} if groups > 1 else {}),
        },
        tags=frozenset(_tags(config)),
        experts=number,
        pins={config.path("head_dim"): head_dim},
        kv_entries={"attention": "2*kv_heads*head_dim"},
    )


def _kinds(config: Config, letters: str, words: str) -> list[str]:
    """For each layer its kind, from a string of letters or a list of words."""
    named = config.values.get(words)
    found = named if named is not None else config.values.get(letters)
    if found is None:
        raise ValueError(f"{config.at}{letters} is missing from the config")
    table = KINDS if named is None else WORDS
    unknown = [kind for kind in found if kind not in table]
    if unknown:
        raise ValueError(f"{letters} must be of {', '.join(table)}, got {unknown[0]!r}")
    return [table[kind] for kind in found]


def _tags(config: Config) -> Iterable[str]:
    yield "mamba_norm"
    if not config.flag("tie_word_embeddings"):
        yield "untied"
    if config.flag("use_bias"):
        yield from ("mamba_bias", "mamba_out_bias")
    if config.flag("use_conv_bias", True):
        yield "conv_bias"
    for key, tags in (("attention_bias", ("qkv_bias", "o_bias")), ("mlp_bias", ("mlp_bias",))):
        if config.flag(key):
            yield from tags


def _frame() -> tuple[Rule, ...]:
    return (
        Rule("backbone.embeddings.weight", ("vocab", "hidden"), NO_TOKEN, plain=True),
        Rule("backbone.norm_f.weight", ("hidden",)),
        Rule("lm_head.weight", ("vocab", "hidden"), NO_LOGIT, ("untied",), plain=True),
        Rule("lm_head.weight", ("vocab", "hidden"), NO_LOGIT, ("!untied",), plain=True, spare=True),
    )


def _layer(layer: str, kinds: Iterable[str], groups: int, latent: int) -> tuple[Rule, ...]:
    """The rules of layers of some kinds, which a layer's tag tells apart."""
    at = layer + "mixer."
    found: list[Rule] = [Rule(layer + "norm.weight", ("hidden",))]
    for kind in kinds:
        if kind == "mamba":
            found += mixer(at, groups)
        elif kind == "attention":
            found += _attention(layer, at)
        elif kind == "mlp":
            found += _squared(at, "intermediate", "hidden", ("mlp",))
            found += _biases(at, "intermediate", ("mlp",))
        else:
            found += _experts(at, latent)
    return tuple(found)


def _attention(layer: str, at: str) -> Iterable[Rule]:
    """Without positions and without norms on queries and keys."""
    for rule in attention(layer):
        if "_proj." in rule.pattern:
            name = rule.pattern.rpartition("self_attn.")[2]
            yield replace(rule, pattern=at + name, when=("attention", *rule.when))


def _squared(at: str, width: str, outer: str, when: tuple[str, ...]) -> tuple[Rule, ...]:
    return (
        Rule(at + "up_proj.weight", (width, outer), NO_SQUARE, when),
        Rule(at + "down_proj.weight", (outer, width), NO_WIDTH, when),
    )


def _biases(at: str, width: str, when: tuple[str, ...]) -> tuple[Rule, ...]:
    """Those of an MLP; a routed expert has none."""
    return (
        Rule(at + "up_proj.bias", (width,), NO_SQUARE, (*when, "mlp_bias")),
        Rule(at + "down_proj.bias", ("hidden",), "", (*when, "mlp_bias")),
    )


def _experts(at: str, latent: int) -> tuple[Rule, ...]:
    when = ("moe",)
    biased = (*when, "mlp_bias")
    projections: tuple[Rule, ...] = ()
    if latent:
        projections = (
            Rule(at + "fc1_latent_proj.weight", ("latent", "hidden"), "", when),
            Rule(at + "fc1_latent_proj.bias", ("latent",), "", biased),
            Rule(at + "fc2_latent_proj.weight", ("hidden", "latent"), "", when),
            Rule(at + "fc2_latent_proj.bias", ("hidden",), "", biased),
        )
    return (
        Rule(at + "gate.weight", ("experts", "hidden"), "", when, plain=True),
        Rule(at + "gate.e_score_correction_bias", ("experts",), "", when),
        *projections,
        *_squared(at + "experts.#.", "moe_intermediate", "latent" if latent else "hidden", when),
        *_squared(at + "shared_experts.", "shared_intermediate", "hidden", when),
        *_biases(at + "shared_experts.", "shared_intermediate", when),
    )


def _drafts(kinds: list[str], groups: int, latent: int) -> tuple[Rule, ...]:
    """Layers that predict a token more, numbered from 0; absent in copies made by Transformers."""
    rules: list[Rule] = []
    for number, kind in enumerate(kinds):
        at = f"mtp.layers.{number}."
        for rule in _layer(at, (kind,), groups, latent):
            rules.append(replace(rule, when=tuple(tag for tag in rule.when if tag != kind)))
    if kinds:
        first, last = "mtp.layers.0.", f"mtp.layers.{len(kinds) - 1}."
        rules += [
            Rule(first + "enorm.weight", ("hidden",)),
            Rule(first + "hnorm.weight", ("hidden",)),
            Rule(first + "eh_proj.weight", ("hidden", "2*hidden")),
            Rule(last + "final_layernorm.weight", ("hidden",)),
        ]
    return tuple(replace(rule, spare=True) for rule in rules)


def refuse_nas(values: Mapping[str, Any]) -> Model:
    """Puzzle models: every layer has an MLP width of its own."""
    raise ValueError(
        f"model_type {values['model_type']!r}: block_configs say each layer's MLP width as "
        "ffn_mult, rounded by the engine to 256, which leaves no place for a padded width"
    )
