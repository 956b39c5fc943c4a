"""Attention with Mamba-2 and gated MLPs: Granite-4-H, Bamba (by layers), Falcon-H1 (side by side).

Names and shapes: Transformers 5.24, ``models/granitemoehybrid``, ``models/bamba`` and
``models/falcon_h1``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import gcd
from typing import Any

from tp3.pad.families.config import Config
from tp3.pad.families.latent import LAYER, count, paths
from tp3.pad.families.llama import (
    NO_GATE,
    NO_LOGIT,
    NO_TOKEN,
    NO_WIDTH,
    attention,
    mlp,
    norms,
    only,
)
from tp3.pad.families.mamba import mamba_axis, mamba_sizes, mixer
from tp3.pad.model import HeadAxes, Model, Rule, Tags, Vocabulary, Width

ATTENTION = ("attention", "full_attention")
WIDTH = "mamba_heads*mamba_head_dim"
MIXER_BIASES = {"mamba_proj_bias": ("mamba_bias", "mamba_out_bias")}
SIDE_BIASES = {"mamba_proj_bias": ("mamba_bias",), "projectors_bias": ("mamba_out_bias",)}


@dataclass(frozen=True)
class Hybrid:
    """How a ``model_type`` arranges and names its parts."""

    final_norm: str = "final_layernorm"
    mlp_norm: str = "pre_ff_layernorm"
    side_by_side: bool = False
    granite: bool = False


HYBRIDS = {
    "bamba": Hybrid(),
    "falcon_h1": Hybrid(side_by_side=True),
    "granitemoehybrid": Hybrid("norm", "post_attention_layernorm", granite=True),
}


def read(values: Mapping[str, Any]) -> Model:
    """The model of a config of this kin."""
    config, hybrid = Config(values), HYBRIDS[values["model_type"]]
    q, kv, head_dim = config.heads()
    groups = config.size("mamba_n_groups", 1)
    mamba = mamba_axis(config.size("mamba_n_heads"), groups)
    number = count(config, "num_local_experts") if hybrid.granite else 0
    keys = _widths(hybrid, number)
    own_width = config.has("mamba_d_ssm")
    layers = _layers(config, hybrid)
    return Model(
        model_type=str(values["model_type"]),
        axes=(
            HeadAxes(q, kv, head_dim, layers=sum("attention" in tags for tags in layers)),
            mamba,
            *(Width(name, config.size(key)) for name, key in keys.items()),
            Vocabulary("vocab", config.size("vocab_size")),
        ),
        sizes={
            "hidden": config.size("hidden_size"),
            "head_dim": head_dim,
            "rotary": head_dim // 2,
            **_mamba_sizes(config),
            **({"experts": number} if number else {}),
        },
        layers=layers,
        rules=(
            *_frame(hybrid),
            *only(attention(), "attention"),
            *mixer(LAYER + "mamba.", groups),
            *(_granite(number) if hybrid.granite else mlp(LAYER + "feed_forward.")),
            *norms(names=("input_layernorm", hybrid.mlp_norm)),
        ),
        paths={
            **paths(
                config,
                q_heads="num_attention_heads",
                kv_heads="num_key_value_heads",
                mamba_heads="mamba_n_heads",
                vocab="vocab_size",
                **keys,
            ),
            **({"mamba_groups": (config.path("mamba_n_groups"),)} if groups > 1 else {}),
        },
        tags=frozenset(_tags(config, hybrid)),
        pins={
            config.path("head_dim"): head_dim,
            config.path("mamba_d_head"): _mamba_sizes(config)["mamba_head_dim"],
        },
        lengths=(
            {config.path("mamba_d_ssm"): WIDTH}
            if own_width
            else {config.path("mamba_expand"): WIDTH + " / hidden"}
        ),
        kv_entries={"attention": "2*kv_heads*head_dim"},
        notes=() if own_width else _expand_notes(config),
    )


def _widths(hybrid: Hybrid, number: int) -> dict[str, str]:
    if not hybrid.granite:
        return {"intermediate": "intermediate_size"}
    routed = {"moe_intermediate": "intermediate_size"} if number else {}
    return {**routed, "shared_intermediate": "shared_intermediate_size"}


def _expand_notes(config: Config) -> tuple[str, ...]:
    """The config says the width as a multiple of the hidden size, and is refused if not a whole one
    (Transformers 5.24, ``GraniteMoeHybridConfig``, ``BambaConfig``).
    """
    hidden, head_dim = config.size("hidden_size"), _mamba_sizes(config)["mamba_head_dim"]
    heads = hidden // gcd(hidden, head_dim)
    return (
        f"mamba_expand is a whole number only at multiples of {heads} Mamba heads: engines that "
        "insist on one need that many, asked for as a local multiple",
    )


def _mamba_sizes(config: Config) -> dict[str, int]:
    """``mamba_d_head`` may be "auto"."""
    if config.values.get("mamba_d_head", "auto") == "auto":
        expanded = config.size("mamba_expand", 2) * config.size("hidden_size")
        width, heads = config.size("mamba_d_ssm", expanded), config.size("mamba_n_heads")
        config = Config({**config.values, "mamba_d_head": width // heads}, config.at)
    return mamba_sizes(config, "mamba_d_head", "mamba_d_state", "mamba_d_conv")


def _layers(config: Config, hybrid: Hybrid) -> tuple[Tags, ...]:
    layers = config.size("num_hidden_layers")
    if hybrid.side_by_side:
        return (frozenset({"attention", "mamba"}),) * layers
    types = config.values.get("layer_types") or config.values.get("layers_block_type")
    if types is None:
        chosen = config.values.get("attn_layer_indices")
        if chosen is None:
            raise ValueError(f"{config.at}layer_types is missing from the config")
        types = ["attention" if layer in chosen else "mamba" for layer in range(layers)]
    if len(types) != layers:
        raise ValueError(f"layer_types must name {layers} layers, got {len(types)}")
    return tuple(frozenset({"attention" if kind in ATTENTION else "mamba"}) for kind in types)


def _tags(config: Config, hybrid: Hybrid) -> Iterable[str]:
    flags = {
        "attention_bias": ("qkv_bias", "o_bias"),
        "mlp_bias": ("mlp_bias",),
        **(SIDE_BIASES if hybrid.side_by_side else MIXER_BIASES),
    }
    for key, tags in flags.items():
        if config.flag(key):
            yield from tags
    if config.flag("mamba_conv_bias", True):
        yield "conv_bias"
    if not config.flag("tie_word_embeddings"):
        yield "untied"
    if not hybrid.side_by_side or config.flag("mamba_rms_norm"):
        yield "mamba_norm"


def _frame(hybrid: Hybrid) -> tuple[Rule, ...]:
    return (
        Rule("model.embed_tokens.weight", ("vocab", "hidden"), NO_TOKEN, plain=True),
        Rule("lm_head.weight", ("vocab", "hidden"), NO_LOGIT, ("untied",), plain=True),
        Rule("lm_head.weight", ("vocab", "hidden"), NO_LOGIT, ("!untied",), plain=True, spare=True),
        Rule(f"model.{hybrid.final_norm}.weight", ("hidden",)),
    )


def _granite(number: int) -> tuple[Rule, ...]:
    """Experts in one tensor, gate above up; the shared MLP alike."""
    at, shared = LAYER + "block_sparse_moe.", LAYER + "shared_mlp."
    rows = "shared_intermediate + shared_intermediate"
    routed = (
        Rule(at + "router.layer.weight", ("experts", "hidden"), plain=True),
        Rule(
            at + "input_linear.weight",
            ("experts", "moe_intermediate + moe_intermediate", "hidden"),
            NO_GATE,
        ),
        Rule(at + "output_linear.weight", ("experts", "hidden", "moe_intermediate"), NO_WIDTH),
    )
    return (
        *(routed if number else ()),
        Rule(shared + "input_linear.weight", (rows, "hidden"), NO_GATE),
        Rule(shared + "output_linear.weight", ("hidden", "shared_intermediate"), NO_WIDTH),
    )
