"""MiMo-V2-Flash: sliding layers with a head geometry of their own and sinks, values narrower than
keys.

The Hub's config has a key for every size of the sliding layers (``swa_*``); Transformers 5 keeps
one count of query heads and gives sliding layers twice the KV heads. Draft layers are sliding ones
with a dense MLP. Sources: Transformers 5.24, vLLM's ``mimo_v2`` and ``mimo_v2_mtp``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tp3.pad.families import llama, mixture, moe
from tp3.pad.families.config import Config
from tp3.pad.families.decoder import Kin, decoder
from tp3.pad.families.gpt_oss import NO_SINK
from tp3.pad.model import HeadAxes, Model, Rule

KIN = Kin("attention_bias")
_DRAFT_NORMS = ("enorm", "hnorm", "input_layernorm", "pre_mlp_layernorm", "final_layernorm")
_SINK = "self_attn.attention_sink_bias"


def read(values: Mapping[str, Any]) -> Model:
    """The model of a MiMo-V2-Flash config."""
    if values.get("attention_projection_layout") == "fused_qkv":
        raise ValueError(
            "attention_projection_layout must be split, got 'fused_qkv', whose rows are dealt to "
            "the ranks that wrote the checkpoint"
        )
    config, layer = Config(values), KIN.layer
    sliding = _flags(config, "hybrid_layer_pattern", "layer_types", "sliding_attention")
    sparse = _flags(config, "moe_layer_freq", "mlp_layer_types", "sparse")
    at = layer + "mlp."
    experts = (
        *moe.router(at, mixture.MIXTURES["glm4_moe"].router),
        *moe.experts(at + "experts."),
    )
    rules = (
        *llama.frame(),
        *llama.attention(layer, value="value_dim"),
        Rule(layer + _SINK, ("q_heads",), NO_SINK, ("sink",), fill=0.0),
        *llama.norms(layer),
        *llama.only(llama.mlp(at), "dense"),
        *llama.only(experts, "sparse"),
        *_draft_layers(config),
    )
    sinks = (
        config.flag("add_full_attention_sink_bias", False),
        config.flag("add_swa_attention_sink_bias", True),
    )
    layers = [
        {
            "attention",
            "sparse" if sparse[number] else "dense",
            *(("sliding",) if slides else ()),
            *(("sink",) if sinks[slides] else ()),
        }
        for number, slides in enumerate(sliding)
    ]
    _, _, head_dim = config.heads()
    sizes = {
        "value_dim": config.size("v_head_dim", head_dim),
        "sliding_dim": config.size("swa_head_dim", head_dim),
        "sliding_value_dim": config.size("swa_v_head_dim", config.size("v_head_dim", head_dim)),
        "experts": config.size("n_routed_experts"),
    }
    widths = {"intermediate": "intermediate_size", "moe_intermediate": "moe_intermediate_size"}
    model = decoder(values, KIN, rules, widths=widths, layers=layers, tags=(), sizes=sizes)
    return _with_sliding_heads(model, config)


def _with_sliding_heads(model: Model, config: Config) -> Model:
    full, *others = model.axes
    assert isinstance(full, HeadAxes)
    dim, value = model.sizes["sliding_dim"], model.sizes["sliding_value_dim"]
    own = config.has("swa_num_key_value_heads")
    slides = sum("sliding" in tags for tags in model.layers)
    sliding = HeadAxes(
        config.size("swa_num_attention_heads", full.q) if own else full.q,
        config.size("swa_num_key_value_heads") if own else 2 * full.kv,
        dim,
        ".sliding",
        slides,
    )
    paths = dict(model.paths)
    if own:
        paths["q_heads.sliding"] = (config.path("swa_num_attention_heads"),)
        paths["kv_heads.sliding"] = (config.path("swa_num_key_value_heads"),)
        notes = model.notes
    else:
        paths["q_heads.sliding"] = paths["q_heads"]
        notes = (*model.notes, "sliding layers must keep twice the KV heads: use append alone")
    return replace(
        model,
        axes=(replace(full, layers=full.layers - slides), sliding, *others),
        paths=paths,
        sizes_by_tag={"sliding": {"head_dim": dim, "rotary": dim // 2, "value_dim": value}},
        kv_entries={"attention": "kv_heads*head_dim + kv_heads*value_dim"},
        notes=notes,
    )


def _flags(config: Config, given: str, named: str, kind: str) -> list[bool]:
    """For each layer whether it is of a kind: 0 or 1 on the Hub, a name from Transformers."""
    count, flags = config.size("num_hidden_layers"), config.listed(given)
    if flags is None:
        flags = [each == kind for each in config.listed(named) or ()]
    if len(flags) != count:
        raise ValueError(f"{given} must say something of {count} layers, got {len(flags)}")
    return [bool(each) for each in flags]


def _draft_layers(config: Config) -> tuple[Rule, ...]:
    rules: list[Rule] = []
    for number in range(config.count("num_nextn_predict_layers", 3)):
        layer = f"model.mtp.layers.{number}."
        heads = llama.attention(
            layer, suffix=".sliding", head="sliding_dim", value="sliding_value_dim"
        )
        rules += [*heads, *llama.mlp(layer + "mlp."), *llama.norms(layer, _DRAFT_NORMS)]
        rules.append(Rule(layer + _SINK, ("q_heads.sliding",), NO_SINK, fill=0.0))
        rules.append(Rule(layer + "eh_proj.weight", ("hidden", "2*hidden"), plain=True))
    return llama.spare(rules)
