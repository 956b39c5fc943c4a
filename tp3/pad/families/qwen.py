"""Qwen3-Next, Qwen3.5 and Qwen3.6: gated delta nets in most layers, gated attention in the others.

A delta net has K key heads and V = r K value heads; value head i reads key head i // r, so whole
key heads are appended, each with its r value heads. A dummy head's state stays zero, and its output
is the norm of 0 times silu(0). Qwen3-Next interleaves its projections by key head; Qwen3.5 keeps
flat sections. Sources: Transformers 5.24; vLLM's ``qwen3_5_mtp`` for the names under ``mtp.``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tp3.pad.families import llama, mixture, moe
from tp3.pad.families.config import Config
from tp3.pad.families.decoder import Kin, decoder, nested, text_of
from tp3.pad.model import Model, Rule, Units

NO_STATE = "a dummy head's state stays 0"
NO_DECAY = "a finite decay of a state of 0"

_KIN = Kin("attention_bias", "attention_bias", qk_norm="head")
_OUTER = nested(_KIN, "model.visual.")
KIN = {
    "qwen3_next": _KIN,
    "qwen3_5": _OUTER,
    "qwen3_5_text": _KIN,
    "qwen3_5_moe": _OUTER,
    "qwen3_5_moe_text": _KIN,
}
_FLAT = (
    "linear_key_heads*linear_key_dim + linear_key_heads*linear_key_dim"
    " + linear_value_heads*linear_value_dim"
)


def delta_net(layer: str, *, interleaved: bool) -> tuple[Rule, ...]:
    """A gated delta net. Sizes: qkvz and ba are what a key head takes of the fused projections."""
    at = layer + "linear_attn."
    if interleaved:
        inputs: tuple[Rule, ...] = (
            Rule(at + "in_proj_qkvz.weight", ("linear_key_heads*qkvz", "hidden"), NO_STATE),
            Rule(at + "in_proj_ba.weight", ("linear_key_heads*ba", "hidden"), NO_STATE, plain=True),
        )
    else:
        values = "linear_value_heads*linear_value_dim"
        inputs = (
            Rule(at + "in_proj_qkv.weight", (_FLAT, "hidden"), NO_STATE),
            Rule(at + "in_proj_z.weight", (values, "hidden"), llama.NO_GATE),
            Rule(at + "in_proj_b.weight", ("linear_value_heads", "hidden"), NO_STATE, plain=True),
            Rule(at + "in_proj_a.weight", ("linear_value_heads", "hidden"), NO_DECAY, plain=True),
        )
    return (
        *inputs,
        Rule(at + "conv1d.weight", (_FLAT, "1", "conv"), NO_STATE, plain=True),
        Rule(at + "A_log", ("linear_value_heads",), NO_DECAY),
        Rule(at + "dt_bias", ("linear_value_heads",), NO_DECAY),
        Rule(at + "norm.weight", ("linear_value_dim",)),
        Rule(
            at + "out_proj.weight", ("hidden", "linear_value_heads*linear_value_dim"), llama.NO_HEAD
        ),
    )


def read(values: Mapping[str, Any]) -> Model:
    """The model of a config whose ``model_type`` is a row of ``KIN``."""
    kin = KIN[values["model_type"]]
    config = text_of(values, kin)
    sparse, interleaved = config.has("moe_intermediate_size"), values["model_type"] == "qwen3_next"
    plain = mixture.DENSE["step" if sparse else "all"](config)
    keys, key_dim, value_dim, ratio = _heads(config)
    sizes = {
        "linear_key_dim": key_dim,
        "linear_value_dim": value_dim,
        "qkvz": 2 * key_dim + 2 * ratio * value_dim,
        "ba": 2 * ratio,
        "conv": config.size("linear_conv_kernel_dim"),
    }
    widths = {"intermediate": "intermediate_size"} if any(plain) else {}
    if sparse:
        sizes["experts"] = moe.number_of_experts(config)
        widths["moe_intermediate"] = "moe_intermediate_size"
        widths["shared_intermediate"] = "shared_expert_intermediate_size"
    layer, gated = kin.layer, config.flag("attn_output_gate", True)
    experts = _experts if interleaved else _either_experts
    rules = (
        *llama.frame(kin.root, kin.head),
        *llama.only(llama.attention(layer, gated=gated), "attention"),
        *llama.only(delta_net(layer, interleaved=interleaved), "linear"),
        *llama.norms(layer),
        *llama.only(llama.mlp(layer + "mlp."), "dense"),
        *llama.only(experts(layer + "mlp."), "sparse"),
        *_draft_layers(config, sparse, gated),
    )
    layers = [
        (kind, "dense" if each else "sparse")
        for kind, each in zip(_kinds(config), plain, strict=True)
    ]
    model = decoder(values, kin, rules, widths=widths, layers=layers, sizes=sizes)
    units = Units("linear_key_heads", keys, {"linear_value_heads": ratio})
    paths = {
        "linear_key_heads": (config.path("linear_num_key_heads"),),
        "linear_value_heads": (config.path("linear_num_value_heads"),),
    }
    return replace(model, axes=(*model.axes, units), paths={**model.paths, **paths})


def _heads(config: Config) -> tuple[int, int, int, int]:
    """Key heads, their size, the value heads' size, and value heads to a key head."""
    keys, values = config.size("linear_num_key_heads"), config.size("linear_num_value_heads")
    if values % keys:
        raise ValueError(
            f"{config.at}linear_num_value_heads must be a multiple of linear_num_key_heads, got "
            f"{values} and {keys}"
        )
    sizes = config.size("linear_key_head_dim"), config.size("linear_value_head_dim")
    return keys, *sizes, values // keys


def _kinds(config: Config) -> list[str]:
    """For each layer "attention" or "linear"."""
    count = config.size("num_hidden_layers")
    given = config.listed("layer_types")
    if given is None:
        every = config.size("full_attention_interval", 4)
        given = [
            "linear_attention" if (number + 1) % every else "full_attention"
            for number in range(count)
        ]
    names = {"linear_attention": "linear", "full_attention": "attention"}
    unknown = sorted(set(given) - set(names))
    if unknown or len(given) != count:
        raise ValueError(
            f"{config.at}layer_types must name {count} layers, each one of {', '.join(names)}, got "
            f"{unknown[0] if unknown else len(given)}"
        )
    return [names[each] for each in given]


def _experts(at: str) -> tuple[Rule, ...]:
    return _sparse(at, moe.experts(at + "experts."))


def _either_experts(at: str) -> tuple[Rule, ...]:
    """Qwen3.5 is published with fused experts; quantised and saved again they are single."""
    single = moe.experts(at + "experts.")
    return _sparse(at, moe.either(moe.fused_experts(at + "experts."), single))


def _sparse(at: str, experts: tuple[Rule, ...]) -> tuple[Rule, ...]:
    names = mixture.MIXTURES["qwen2_moe"].router
    shared = llama.mlp(at + "shared_expert.", "shared_intermediate")
    return *moe.router(at, names), *experts, *shared


def _draft_layers(config: Config, sparse: bool, gated: bool) -> tuple[Rule, ...]:
    """Layers for multi-token prediction: full attention, under ``mtp.``; some savers drop them."""
    count = config.count("mtp_num_hidden_layers", 1)
    names = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    rules = [
        Rule("mtp.fc.weight", ("hidden", "2*hidden"), plain=True),
        *(Rule(f"mtp.{name}.weight", ("hidden",)) for name in names),
    ]
    for number in range(count):
        layer = f"mtp.layers.{number}."
        rules += [*llama.attention(layer, gated=gated), *llama.norms(layer)]
        rules += _either_experts(layer + "mlp.") if sparse else llama.mlp(layer + "mlp.")
    return llama.spare(rules)
