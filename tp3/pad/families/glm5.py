"""GLM-5.3-Flash (``glm5_next``): delta attention, a latent layer in four with an indexer that pools
keys, hyper-connections, experts; with or without a vision tower.

Names and shapes: Transformers 5.24, ``models/glm5_next``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tp3.pad.families import deepseek
from tp3.pad.families.config import Config
from tp3.pad.families.deepseek_v4 import hyper
from tp3.pad.families.kda import delta, delta_heads
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
    tower_notes,
    untouched,
)
from tp3.pad.families.llama import frame, norms
from tp3.pad.model import Model, Rule, Tags, Units

INDEXER = LAYER + "self_attn.indexer."
FULL = ("indexed_attention", "full_attention")
NESTED = "model.language_model."


def read(values: Mapping[str, Any]) -> Model:
    """The model of a config of this kin, its text sizes nested or not."""
    outer = Config(values)
    config = outer.folder("text_config") if outer.has("text_config") else outer
    extra = count(config, "num_nextn_predict_layers")
    number, multiple = config.size("n_routed_experts"), config.size("hc_mult", 4)
    heads, delta_sizes, places = delta_heads(config)
    root = NESTED if outer.has("text_config") else "model."
    tags = {"router_bias"} if config.flag("tie_word_embeddings") else {"router_bias", "untied"}
    if count(config, "n_shared_experts"):
        tags.add("shared")
    return Model(
        model_type=str(values["model_type"]),
        axes=(*deepseek.axes(config, number), Units("kda_heads", heads)),
        sizes={
            "hidden": config.size("hidden_size"),
            "experts": number,
            "pooled": config.size("index_kpool", 16),
            "streams": multiple,
            "mixes": (2 + multiple) * multiple,
            **latent_sizes(config),
            **indexer_sizes(config),
            **delta_sizes,
        },
        layers=(*_layers(config), *(frozenset({"mtp", "mla", "indexer", "moe"}),) * extra),
        rules=(*_rules(root, extra), *untouched("model.visual.")),
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
        kv_entries={"cached": "kv_a_rows"},
        notes=tower_notes(outer, "num_heads"),
    )


def _layers(config: Config) -> list[Tags]:
    layers = config.size("num_hidden_layers")
    types = config.values.get("layer_types")
    full = [kind in FULL for kind in types] if types else [n % 4 == 3 for n in range(layers)]
    kinds, own = deepseek.mlp_tags(config, layers, 3), own_indexers(config, layers)
    found = []
    for layer in range(layers):
        tags = {"mla", "cached"} if full[layer] else {"kda"}
        if full[layer] and own[layer]:
            tags.add("indexer")
        found.append(frozenset({*tags, kinds[layer]}))
    return found


def _rules(root: str, extra: int) -> tuple[Rule, ...]:
    when = ("indexer",)
    block: tuple[Rule, ...] = (
        *attention(True, when=("mla",)),
        *indexer(),
        Rule(INDEXER + "index_kpool_compress_ape", ("pooled", "index_head_dim"), "", when),
        Rule(INDEXER + "index_kpool_compress_gate", ("index_head_dim", "hidden"), "", when),
        *delta(("kda_heads",)),
        *hyper(LAYER),
        *gated(LAYER + "mlp.", "intermediate", ("dense",)),
        *experts(),
        *norms(),
    )
    block = predicting(block) if extra else block
    return tuple(
        replace(rule, pattern=root + rule.pattern.removeprefix("model."))
        if rule.pattern.startswith("model.")
        else rule
        for rule in (*frame(), *block)
    )
