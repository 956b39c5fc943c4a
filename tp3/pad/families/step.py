"""Step-3.5 and Step-3.7: sliding layers with more query heads, a gate per head, stacked experts.

``g_proj`` gives each query head one gate, so its rows are heads. The KV heads of both geometries
have one key in the Hub's configs of Transformers 5 and two in Step's own. Source: Transformers
5.24 (``step3p7``); draft layers after vLLM's ``step3p5_mtp``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tp3.pad.families import llama, moe
from tp3.pad.families.config import Config
from tp3.pad.families.decoder import Kin, decoder, nested
from tp3.pad.model import HeadAxes, Model, Rule

_KIN = Kin("attention_bias", "attention_bias", "mlp_bias", qk_norm="head")
_VISION = nested(_KIN, "vision_model.", "vit_large_projector.", outer="model.")
# the same size as Step's own configs call it and as Transformers saves it
_CALLED = {
    "num_key_value_heads": "num_attention_groups",
    "n_routed_experts": "moe_num_experts",
    "share_expert_dim": "share_expert_dims",
}


def read(values: Mapping[str, Any]) -> Model:
    """The model of a Step-3.5 or Step-3.7 config."""
    kin = _VISION if "text_config" in values else _KIN
    config, called = _renamed(values, kin)
    layer = kin.layer
    kinds = _named(config, "layer_types")
    sparse = _sparse_layers(config)
    rules = (
        *llama.frame(kin.root, kin.head),
        *llama.attention(layer),
        Rule(layer + "self_attn.g_proj.weight", ("q_heads", "hidden"), llama.NO_HEAD, plain=True),
        *llama.norms(layer),
        *llama.only(llama.mlp(layer + "mlp."), "dense"),
        *llama.only(_experts(layer), "sparse"),
        *_draft_layers(config, kin, kinds),
    )
    layers = [
        {
            "attention",
            "sparse" if number in sparse else "dense",
            *(("sliding",) if kind == "sliding_attention" else ()),
        }
        for number, kind in enumerate(kinds[: config.size("num_hidden_layers")])
    ]
    outer = {**values, kin.text: config.values} if kin.text else config.values
    widths = {
        "intermediate": "intermediate_size",
        "moe_intermediate": "moe_intermediate_size",
        "shared_intermediate": "share_expert_dim",
    }
    sizes = {"experts": config.size("n_routed_experts")}
    model = decoder(outer, kin, rules, widths=widths, layers=layers, sizes=sizes)
    paths = {
        name: tuple(called.get(path, path) for path in found) for name, found in model.paths.items()
    }
    return _with_sliding_heads(replace(model, paths=paths), config)


def _with_sliding_heads(model: Model, config: Config) -> Model:
    full, *others = model.axes
    assert isinstance(full, HeadAxes)
    q, kv, paths = full.q, full.kv, dict(model.paths)
    folder = config.inner("attention_other_setting")
    if config.has("num_sliding_attention_heads"):
        q = config.size("num_sliding_attention_heads")
        saved = config.inner("per_layer_config").values
        paths["q_heads.sliding"] = (
            config.path("num_sliding_attention_heads"),
            *(config.path(f"per_layer_config.{layer}.num_attention_heads") for layer in saved),
        )
        paths["kv_heads.sliding"] = paths["kv_heads"]
    elif folder.values:
        q, kv = folder.size("num_attention_heads", q), folder.size("num_attention_groups", kv)
        paths["q_heads.sliding"] = (folder.path("num_attention_heads"),)
        paths["kv_heads.sliding"] = (folder.path("num_attention_groups"),)
    else:
        return model
    slides = sum("sliding" in tags for tags in model.layers)
    sliding = HeadAxes(q, kv, full.head_dim, ".sliding", slides)
    axes = (replace(full, layers=full.layers - slides), sliding, *others)
    return replace(model, axes=axes, paths=paths)


def _experts(layer: str) -> tuple[Rule, ...]:
    at, width = layer + "moe.", "moe_intermediate"
    names = (("gate.weight", ("experts", "hidden")), ("router_bias", ("experts",)))
    return (
        *moe.router(at, names),
        Rule(at + "gate_proj.weight", ("experts", width, "hidden"), llama.NO_GATE),
        Rule(at + "up_proj.weight", ("experts", width, "hidden"), llama.NO_UP),
        Rule(at + "down_proj.weight", ("experts", "hidden", width), llama.NO_WIDTH),
        *llama.mlp(layer + "share_expert.", "shared_intermediate"),
    )


def _draft_layers(config: Config, kin: Kin, kinds: list[str]) -> tuple[Rule, ...]:
    """Layers for multi-token prediction, numbered after the others, with a dense MLP and a head of
    their own; some savers drop them.
    """
    first, tokens, rules = config.size("num_hidden_layers"), ("vocab", "hidden"), list[Rule]()
    named = kinds[first:] or config.listed("mtp_layer_types") or []
    for number in range(config.count("num_nextn_predict_layers")):
        layer = f"{kin.root}layers.{first + number}."
        slides = named[number : number + 1] == ["sliding_attention"] and _has_own_heads(config)
        suffix = ".sliding" if slides else ""
        rules += [
            *llama.norms(layer, ("enorm", "hnorm")),
            Rule(layer + "eh_proj.weight", ("hidden", "2*hidden"), plain=True),
        ]
        for at in (layer, layer + "transformer."):
            rules += [
                *llama.attention(at, suffix=suffix),
                Rule(f"{at}self_attn.g_proj.weight", (f"q_heads{suffix}", "hidden"), plain=True),
                *llama.norms(at, (*kin.norms, "shared_head.norm")),
                *llama.mlp(at + "mlp."),
                Rule(f"{at}shared_head.output.weight", tokens, llama.NO_LOGIT, plain=True),
            ]
    return llama.spare(rules)


def _has_own_heads(config: Config) -> bool:
    return config.has("num_sliding_attention_heads") or config.has("attention_other_setting")


def _renamed(values: Mapping[str, Any], kin: Kin) -> tuple[Config, dict[str, str]]:
    """The decoder's config with one name for each size, and what the paths really are."""
    found = Config(values).folder(kin.text) if kin.text else Config(values)
    plain, called = dict(found.values), {}
    for name, other in _CALLED.items():
        if plain.get(name) is None and plain.get(other) is not None:
            plain[name] = plain[other]
            called[found.path(name)] = found.path(other)
    return Config(plain, found.at), called


def _named(config: Config, key: str) -> list[str]:
    """What a list says of the layers; the Hub's lists go on with those of the draft."""
    count = config.size("num_hidden_layers")
    given = config.listed(key) or ["full_attention"] * count
    if len(given) < count:
        raise ValueError(f"{config.at}{key} must name {count} layers, got {len(given)}")
    return list(given)


def _sparse_layers(config: Config) -> set[int]:
    count = config.size("num_hidden_layers")
    if config.has("mlp_layer_types"):
        named = _named(config, "mlp_layer_types")
        return {number for number, kind in enumerate(named[:count]) if kind == "sparse"}
    listed = config.values.get("moe_layers_enum")
    if not isinstance(listed, str):
        return set(config.listed("moe_layers_enum") or range(3, count))
    items = [item.strip() for item in listed.split(",") if item.strip()]
    if not all(item.isdigit() for item in items):
        raise ValueError(f"{config.at}moe_layers_enum must number layers, got {listed!r}")
    return {int(item) for item in items}
