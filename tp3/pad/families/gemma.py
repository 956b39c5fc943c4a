"""Gemma 4: sliding and full layers with head sizes, and often KV head counts, of their own.

Both share one count of query heads, so the planner pads them to one that serves both. With
``attention_k_eq_v`` full layers have no v_proj: values are the keys. The last
``num_kv_shared_layers`` read the cache of earlier ones. The per-layer embedding is a vocabulary of
its own. Source: Transformers 5.24 and the configs of google/gemma-4-26B-A4B and -31B.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tp3.pad.families import llama, moe
from tp3.pad.families.config import Config
from tp3.pad.families.decoder import Kin, decoder, nested, text_of
from tp3.pad.model import HeadAxes, Model, Rule, Vocabulary

_AROUND = (*llama.NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")
_KIN = Kin("attention_bias", "attention_bias", norms=_AROUND, tied=True)
_TOWERS = ("vision_tower.", "audio_tower.", "embed_vision.", "embed_audio.")
KIN = {
    "gemma4": nested(_KIN, *("model." + tower for tower in _TOWERS)),
    "gemma4_text": _KIN,
}
_SPARSE_NORMS = (
    "post_feedforward_layernorm_1",
    "post_feedforward_layernorm_2",
    "pre_feedforward_layernorm_2",
)


def read(values: Mapping[str, Any]) -> Model:
    """The model of a Gemma 4 config."""
    kin = KIN[values["model_type"]]
    config, layer = text_of(values, kin), kin.layer
    kinds = _kinds(config)
    rules = (
        *llama.frame(kin.root, kin.head),
        *_attention(layer),
        *llama.norms(layer, kin.norms),
        *llama.only(llama.mlp(layer + "mlp."), "!wide"),
        *llama.only(llama.mlp(layer + "mlp.", "2*intermediate"), "wide"),
        Rule(layer + "layer_scalar", ("1",)),
        *llama.only(_experts(layer), "sparse"),
        *llama.only(_embedded(kin.root), "embedded"),
    )
    widths = {"intermediate": "intermediate_size"}
    sizes = {}
    tags = set()
    if config.flag("enable_moe_block"):
        tags.add("sparse")
        widths["moe_intermediate"] = "moe_intermediate_size"
        sizes["experts"] = moe.number_of_experts(config)
    width = config.count("hidden_size_per_layer_input", 256)
    if width:
        tags.add("embedded")
        sizes["per_layer"], sizes["layers"] = width, len(kinds)
    layers = _layers(config, kinds)
    model = decoder(values, kin, rules, widths=widths, layers=layers, tags=tags, sizes=sizes)
    if width:
        name, key = "vocab.per_layer", "vocab_size_per_layer_input"
        axes = (*model.axes, Vocabulary(name, config.size(key)))
        model = replace(model, axes=axes, paths={**model.paths, name: (config.path(key),)})
    return _with_full_heads(model, config)


def _with_full_heads(model: Model, config: Config) -> Model:
    """The geometry of full layers: their head size, and KV heads of their own where there are."""
    head_dim = _full(config, "head_dim", config.size("global_head_dim", 512))
    kv = config.size("num_key_value_heads", config.size("num_attention_heads"))
    own = config.size("num_global_key_value_heads", kv)
    own = own if config.flag("attention_k_eq_v") else kv
    own = _full(config, "num_key_value_heads", own)
    pins = {**model.pins, config.path("global_head_dim"): head_dim}
    sized = {"full": {"head_dim": head_dim, "rotary": head_dim // 2}}
    model = replace(model, sizes_by_tag=sized, pins=pins)
    if own == kv:
        return model
    sliding, *others = model.axes
    assert isinstance(sliding, HeadAxes)
    full = HeadAxes(sliding.q, own, head_dim, ".full", sum("full" in tags for tags in model.layers))
    sliding = replace(sliding, layers=sliding.layers - full.layers)
    saved = config.inner("per_layer_config").values
    paths = {
        **model.paths,
        "q_heads.full": model.paths["q_heads"],
        "kv_heads.full": (
            config.path("num_global_key_value_heads"),
            *(config.path(f"per_layer_config.{layer}.num_key_value_heads") for layer in saved),
        ),
    }
    return replace(model, axes=(sliding, full, *others), paths=paths)


def _full(config: Config, key: str, default: int) -> int:
    """A size of the full layers where Transformers 5 saved it for each layer."""
    saved = config.inner("per_layer_config")
    folders = [saved.inner(layer) for layer in saved.values]
    found = {folder.size(key) for folder in folders if folder.has(key)}
    if len(found) > 1:
        raise ValueError(f"{saved.at}* must have one {key}, got {sorted(found)}")
    return found.pop() if found else default


def _kinds(config: Config) -> list[str]:
    """For each layer "full" or "sliding"; the last is full whatever the config says."""
    count = config.size("num_hidden_layers")
    given = config.listed("layer_types")
    if given is None:
        given = ["sliding_attention" if (n + 1) % 6 else "full_attention" for n in range(count)]
    if len(given) != count:
        raise ValueError(f"{config.at}layer_types must name {count} layers, got {len(given)}")
    kinds = ["full" if each == "full_attention" else "sliding" for each in given]
    return [*kinds[:-1], "full"]


def _layers(config: Config, kinds: list[str]) -> list[set[str]]:
    first_reader = len(kinds) - config.count("num_kv_shared_layers")
    equal, wide = config.flag("attention_k_eq_v"), config.flag("use_double_wide_mlp")
    layers = []
    for number, kind in enumerate(kinds):
        tags = {kind}
        if number < first_reader:
            tags |= {"attention"} if kind == "full" and equal else {"attention", "values"}
        elif wide:
            tags.add("wide")
        layers.append(tags)
    return layers


def _attention(layer: str) -> tuple[Rule, ...]:
    """Tags: attention (the layer has keys of its own), values (and values)."""
    needs = {"k_proj": ("attention",), "v_proj": ("attention", "values"), "k_norm": ("attention",)}
    norms = (
        Rule(layer + "self_attn.q_norm.weight", ("head_dim",)),
        Rule(layer + "self_attn.k_norm.weight", ("head_dim",)),
    )
    return tuple(
        replace(rule, when=(*needs.get(rule.pattern.split(".")[-2], ()), *rule.when))
        for rule in (*llama.attention(layer), *norms)
    )


def _experts(layer: str) -> tuple[Rule, ...]:
    fused, single = moe.fused_experts(layer + "experts."), moe.experts(layer + "experts.")
    names = (
        ("proj.weight", ("experts", "hidden")),
        ("scale", ("hidden",)),
        ("per_expert_scale", ("experts",)),
    )
    return (
        *moe.router(layer + "router.", names),
        *moe.either(fused, single),
        *llama.norms(layer, _SPARSE_NORMS),
    )


def _embedded(root: str) -> tuple[Rule, ...]:
    """What every layer adds of its own embedding of the token."""
    layer = root + "layers.*."
    table, both = root + "embed_tokens_per_layer.weight", "layers*per_layer"
    return (
        Rule(table, ("vocab.per_layer", both), llama.NO_TOKEN, plain=True),
        Rule(root + "per_layer_model_projection.weight", (both, "hidden")),
        Rule(root + "per_layer_projection_norm.weight", ("per_layer",)),
        Rule(layer + "per_layer_input_gate.weight", ("per_layer", "hidden")),
        Rule(layer + "per_layer_projection.weight", ("hidden", "per_layer")),
        Rule(layer + "post_per_layer_input_norm.weight", ("hidden",)),
    )
