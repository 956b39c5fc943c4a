"""MiniMax-M3: a norm per head, dense first layers, shared experts, an indexer head per KV group.

An indexer head chooses the blocks of keys that one KV group reads, so indexer heads are KV heads:
a dummy one scores every block 0 for dummy query heads, a copied one serves the copied group. Its
one key head stays. Sources: Transformers 5.24 (``minimax_m3_vl``), the config of
MiniMaxAI/MiniMax-M3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tp3.pad.families import llama, mixture, moe
from tp3.pad.families.config import Config
from tp3.pad.families.decoder import Kin, decoder, inside, text_of
from tp3.pad.model import Model, Rule

_KIN = Kin(qk_norm="head")
_TOWERS = ("vision_tower.", "multi_modal_projector.", "patch_merge_mlp.")
KIN = {"minimax_m3": _KIN, "minimax_m3_vl": inside(_KIN, *_TOWERS)}
_M2 = mixture.MIXTURES["minimax_m2"]


def read(values: Mapping[str, Any]) -> Model:
    """The model of a MiniMax-M3 config."""
    kin = KIN[values["model_type"]]
    config, layer = text_of(values, kin), kin.layer
    if config.flag("attention_output_gate"):
        raise ValueError(f"{config.at}attention_output_gate must be false, got true")
    count = config.size("num_hidden_layers")
    sparse = _flags(config, "mlp_layer_types", "sparse", config.listed("moe_layer_freq"), True)
    index = config.inner("sparse_attention_config")
    indexed = _flags(
        config, "layer_types", "minimax_m3_sparse", index.listed("sparse_attention_freq"), False
    )
    at = layer + _M2.block
    experts = (
        *moe.router(at, _M2.router),
        *moe.experts(at + "experts.", _M2.names),
        *llama.mlp(at + "shared_experts.", "shared_intermediate"),
    )
    rules = (
        *llama.frame(kin.root, kin.head),
        *llama.attention(layer),
        *llama.only(_indexer(layer), "indexed"),
        *llama.norms(layer),
        *llama.only(llama.mlp(layer + "mlp."), "dense"),
        *llama.only(experts, "sparse"),
    )
    widths = {"moe_intermediate": "intermediate_size", "shared_intermediate": _SHARED}
    if not all(sparse):
        widths["intermediate"] = "dense_intermediate_size"
    model = decoder(
        values,
        kin,
        rules,
        widths=widths,
        layers=(
            ("attention", "sparse" if sparse[number] else "dense")
            + (("indexed",) if indexed[number] else ())
            for number in range(count)
        ),
        sizes={
            "experts": config.size("num_local_experts"),
            "index_dim": config.size("index_head_dim", index.size("sparse_index_dim", 128)),
        },
    )
    paths = dict(model.paths)
    if config.has("moe_intermediate_size"):
        paths["moe_intermediate"] += (config.path("moe_intermediate_size"),)
    if any(indexed):
        paths["kv_heads"] += _index_heads(config)
    return replace(model, paths=paths)


_SHARED = "shared_intermediate_size"


def _indexer(layer: str) -> tuple[Rule, ...]:
    at = layer + "self_attn.index_"
    return (
        Rule(at + "q_proj.weight", ("kv_heads*index_dim", "hidden"), llama.NO_KEY),
        Rule(at + "k_proj.weight", ("index_dim", "hidden")),
        Rule(at + "q_norm.weight", ("index_dim",)),
        Rule(at + "k_norm.weight", ("index_dim",)),
    )


def _index_heads(config: Config) -> tuple[str, ...]:
    """Where the config says their number, which must be that of KV heads."""
    index = config.inner("sparse_attention_config")
    nested = config.path("sparse_attention_config.sparse_num_index_heads")
    own = config.has("index_n_heads") or not index.has("sparse_num_index_heads")
    count = config.size("index_n_heads", index.size("sparse_num_index_heads", 4))
    _, kv, _ = config.heads()
    if count != kv:
        raise ValueError(
            f"indexer heads must be as many as KV heads, one to a group, got {count} and {kv}"
        )
    inner = (nested,) if index.has("sparse_num_index_heads") else ()
    return (*((config.path("index_n_heads"),) if own else ()), *inner)


def _flags(config: Config, key: str, name: str, given: Any, default: bool) -> list[bool]:
    """For each layer whether it is of a kind: a name from Transformers, 0 or 1 on the Hub."""
    named = config.listed(key)
    flags = [each == name for each in named] if named is not None else given
    count = config.size("num_hidden_layers")
    if flags is None:
        return [default] * count
    if len(flags) != count:
        raise ValueError(f"{config.at}{key} must say something of {count} layers, got {len(flags)}")
    return [bool(each) for each in flags]
