"""DeepSeek V2 to V3.2 and their kin: Kimi-K2, GLM-4.7-Flash, GLM-5. Latent attention, experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tp3.pad.families.config import Config
from tp3.pad.families.latent import (
    LAYER,
    attention,
    count,
    experts,
    gated,
    indexer,
    indexer_sizes,
    latent_sizes,
    own_indexers,
    paths,
    predicting,
)
from tp3.pad.families.llama import frame, norms
from tp3.pad.model import Axis, Model, Rule, Tags, Units, Vocabulary, Width


def read(values: Mapping[str, Any]) -> Model:
    """The model of a config of this kin."""
    return read_at(Config(values))


def read_at(config: Config) -> Model:
    """The same where the config is a folder of another (Kimi-K2.5)."""
    layers, extra = config.size("num_hidden_layers"), count(config, "num_nextn_predict_layers")
    number = count(config, "n_routed_experts")
    sparse = config.has("index_n_heads")
    q_lora = config.has("q_lora_rank")
    rules: tuple[Rule, ...] = (
        *attention(q_lora),
        *(indexer() if sparse else ()),
        *gated(LAYER + "mlp.", "intermediate", ("dense",)),
        *(experts() if number else ()),
        *norms(),
    )
    return Model(
        model_type=str(config.values["model_type"]),
        axes=axes(config, number),
        sizes={
            "hidden": config.size("hidden_size"),
            **latent_sizes(config),
            **(indexer_sizes(config) if sparse else {}),
            **({"experts": number} if number else {}),
        },
        layers=_layers(config, layers, extra, number, sparse),
        rules=(*frame(), *(predicting(rules) if extra else rules)),
        paths=paths(
            config,
            q_heads="num_attention_heads num_key_value_heads",
            intermediate="intermediate_size",
            moe_intermediate="moe_intermediate_size",
            vocab="vocab_size",
        ),
        tags=_tags(config),
        experts=number,
        kv_entries={"cached": "kv_a_rows"},
    )


def axes(config: Config, number: int, shared: str = "n_shared_experts") -> tuple[Axis, ...]:
    """Heads, widths, vocabulary. The width of the shared experts is so many times an expert's, and
    engines multiply: the two grow together.
    """
    found: list[Axis] = [
        Units("q_heads", config.size("num_attention_heads")),
        Width("intermediate", config.size("intermediate_size")),
        Vocabulary("vocab", config.size("vocab_size")),
    ]
    if number:
        tied = {"shared_intermediate": max(count(config, shared), 1)}
        found.append(Width("moe_intermediate", config.size("moe_intermediate_size"), tied))
    return tuple(found)


def mlp_tags(config: Config, layers: int, dense: int) -> list[str]:
    """For each layer "moe" or "dense"; ``dense``: how many are at the start if nothing says so."""
    types = config.values.get("mlp_layer_types")
    if types is not None:
        return ["dense" if kind == "dense" else "moe" for kind in types[:layers]]
    first = count(config, "first_k_dense_replace", dense)
    every = max(count(config, "moe_layer_freq", 1), 1)
    return ["moe" if layer >= first and layer % every == 0 else "dense" for layer in range(layers)]


def _layers(config: Config, layers: int, extra: int, number: int, sparse: bool) -> tuple[Tags, ...]:
    kinds = mlp_tags(config, layers, 0) if number else ["dense"] * layers
    own = own_indexers(config, layers) if sparse else [False] * layers
    main = [
        frozenset({"cached", kind, *(("indexer",) if has else ())})
        for kind, has in zip(kinds, own, strict=True)
    ]
    mtp = frozenset({"mtp", "moe" if number else "dense", *(("indexer",) if sparse else ())})
    return (*main, *(mtp,) * extra)


def _tags(config: Config) -> Tags:
    tags = set()
    if config.flag("attention_bias"):
        tags.add("attention_bias")
    if not config.flag("tie_word_embeddings"):
        tags.add("untied")
    if count(config, "n_shared_experts"):
        tags.add("shared")
    v2 = config.values["model_type"] == "deepseek_v2"
    if config.values.get("topk_method", "greedy" if v2 else "noaux_tc") == "noaux_tc":
        tags.add("router_bias")
    return frozenset(tags)
