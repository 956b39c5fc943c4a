"""Decoders with one gated MLP to a layer. A new ``model_type`` is a row of ``KIN``.

Sources: the models of Transformers 5.24, and the names that ``save_pretrained`` writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tp3.pad.families import llama
from tp3.pad.families.config import Config
from tp3.pad.families.decoder import Kin, decoder, inside, nested
from tp3.pad.model import Model, Rule

_ALL = Kin("attention_bias", "attention_bias")
_AFTER = ("post_attention_layernorm", "post_feedforward_layernorm")
_AROUND = ("input_layernorm", *_AFTER, "pre_feedforward_layernorm")
_GEMMA = replace(_ALL, norms=_AROUND, tied=True)

KIN = {
    "llama": Kin("attention_bias", "attention_bias", "mlp_bias"),
    "mistral": Kin(),
    "mistral3": inside(Kin(), "vision_tower.", "multi_modal_projector."),
    "qwen2": Kin("always"),
    "qwen3": replace(_ALL, qk_norm="head"),
    "qwen3_vl": nested(replace(_ALL, qk_norm="head"), "model.visual."),
    "mimo": Kin("always"),
    "smollm3": Kin("attention_bias", "attention_bias", "mlp_bias", tied=True),
    "seed_oss": Kin("attention_bias!", "attention_out_bias", "mlp_bias"),
    "glm4": Kin(
        "attention_bias!",
        norms=(*llama.NORMS, "post_self_attn_layernorm", "post_mlp_layernorm"),
        fused=("gate_up",),
    ),
    "phi3": Kin(fused=("qkv", "gate_up")),
    "olmo2": replace(_ALL, qk_norm="width", norms=_AFTER),
    "olmo3": replace(_ALL, qk_norm="width", norms=_AFTER),
    "cohere2": replace(_ALL, norms=("input_layernorm",), tied=True),
    "gemma2": _GEMMA,
    "gemma3_text": replace(_GEMMA, qk_norm="head"),
    "gemma3": inside(replace(_GEMMA, qk_norm="head"), "vision_tower.", "multi_modal_projector."),
    "ernie4_5": Kin("use_bias", "use_bias", "use_bias", tied=True),
    "hunyuan_v1_dense": replace(
        _ALL, qk_norm="head", qk_names=("query_layernorm", "key_layernorm")
    ),
}


def read(values: Mapping[str, Any]) -> Model:
    """The model of a config whose ``model_type`` is a row of ``KIN``."""
    return _read(values, KIN[values["model_type"]])


def read_unknown(values: Mapping[str, Any]) -> Model:
    """The model of a config with Llama's keys and a ``model_type`` that nothing is known of."""
    model = _read(values, KIN["llama"])
    note = f"model_type {values['model_type']!r} is not known: planned as a Llama"
    return replace(model, notes=(note, *model.notes))


def _read(values: Mapping[str, Any], kin: Kin) -> Model:
    rules = (
        *llama.frame(kin.root, kin.head),
        *block(kin),
        *llama.norms(kin.layer, kin.norms),
        *_draft_layers(values, kin),
    )
    return decoder(values, kin, rules, widths={"intermediate": "intermediate_size"})


def block(kin: Kin, layer: str = "") -> tuple[Rule, ...]:
    """Attention and MLP of a layer."""
    layer = layer or kin.layer
    if "qkv" in kin.fused:
        attention = llama.fused_attention(layer)
    else:
        attention = llama.attention(layer, names=kin.qk_names)
    mlp = llama.fused_mlp if "gate_up" in kin.fused else llama.mlp
    return *attention, *mlp(layer + "mlp.")


def _draft_layers(values: Mapping[str, Any], kin: Kin) -> tuple[Rule, ...]:
    """MiMo's layers for multi-token prediction: a Qwen2 layer between three norms (vLLM's
    ``mimo_mtp``). An engine may load them, so they grow like the others.
    """
    if values["model_type"] != "mimo":
        return ()
    rules: list[Rule] = []
    for number in range(Config(values).count("num_nextn_predict_layers")):
        layer = f"{kin.root}mtp_layers.{number}."
        names = ("token_layernorm", "hidden_layernorm", "final_layernorm", *kin.norms)
        rules += [*block(kin, layer), *llama.norms(layer, names)]
        rules.append(Rule(layer + "input_proj.weight", ("hidden", "2*hidden")))
    return llama.spare(rules)
