"""Kimi-Linear (delta attention, a latent layer in four) and Kimi-K2.5 (Kimi-K2 with a tower)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tp3.pad.families import deepseek
from tp3.pad.families.config import Config
from tp3.pad.families.kda import delta, delta_heads
from tp3.pad.families.latent import (
    LAYER,
    attention,
    count,
    experts,
    gated,
    latent_sizes,
    paths,
    prefixed,
    tower_notes,
    untouched,
)
from tp3.pad.families.llama import frame, norms
from tp3.pad.model import Model, Units


def read_linear(values: Mapping[str, Any]) -> Model:
    """The model of a Kimi-Linear config."""
    config = Config(values)
    layers, number = config.size("num_hidden_layers"), config.size("num_experts")
    heads, sizes, places = delta_heads(config)
    tags = set() if config.flag("tie_word_embeddings") else {"untied"}
    tags.add("router_bias")
    if count(config, "num_shared_experts"):
        tags.add("shared")
    kinds = zip(_attention_kinds(config, layers), deepseek.mlp_tags(config, layers, 1), strict=True)
    return Model(
        model_type=str(values["model_type"]),
        axes=(
            *deepseek.axes(config, number, "num_shared_experts"),
            Units("kda_heads", heads),
        ),
        sizes={
            "hidden": config.size("hidden_size"),
            "experts": number,
            **latent_sizes(config),
            **sizes,
        },
        layers=tuple(frozenset(kind) for kind in kinds),
        rules=(
            *frame(),
            *attention(config.has("q_lora_rank"), when=("mla",)),
            *delta(("1", "1", "kda_heads", "1")),
            *gated(LAYER + "mlp.", "intermediate", ("dense",)),
            *experts(LAYER + "block_sparse_moe.", ("w1", "w3", "w2")),
            *norms(),
        ),
        paths={
            "kda_heads": places,
            **paths(
                config,
                q_heads="num_attention_heads num_key_value_heads",
                intermediate="intermediate_size",
                moe_intermediate="moe_intermediate_size",
                vocab="vocab_size",
            ),
        },
        tags=frozenset(tags),
        experts=number,
        kv_entries={"mla": "kv_a_rows"},
    )


def _attention_kinds(config: Config, layers: int) -> list[str]:
    """ "mla" or "kda" for each layer; the lists in the config count layers from 1."""
    inner = config.values.get("linear_attn_config") or {}
    types = config.values.get("layer_types")
    if inner.get("full_attn_layers") is not None:
        full = {layer - 1 for layer in inner["full_attn_layers"]}
    elif types is not None:
        full = {layer for layer, kind in enumerate(types) if kind == "full_attention"}
    else:
        raise ValueError("linear_attn_config.full_attn_layers is missing from the config")
    return ["mla" if layer in full else "kda" for layer in range(layers)]


def read_k25(values: Mapping[str, Any]) -> Model:
    """The model of a Kimi-K2.5 config: the decoder under ``language_model.``, and the tower."""
    config = Config(values)
    model = deepseek.read_at(config.folder("text_config"))
    return replace(
        model,
        model_type=str(values["model_type"]),
        rules=(
            *prefixed(model.rules, "language_model."),
            *untouched("vision_tower.", "mm_projector."),
        ),
        notes=tower_notes(config, "vt_num_attention_heads", "num_attention_heads"),
    )
