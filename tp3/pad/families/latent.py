"""Rules of multi-head latent attention, its indexer, experts and prediction layers.

Queries come from ``q_lora_rank`` (or straight from the hidden size), keys and values from
``kv_lora_rank``, which every rank keeps whole: only heads are cut. Sizes: ``qk_head_dim`` is
qk_nope + qk_rope, ``kv_b_head`` qk_nope + v, ``kv_a_rows`` kv_lora_rank + qk_rope: what a token's
cache holds. Tensor names and shapes: Transformers 5.24, ``models/deepseek_v3`` and
``models/deepseek_v32``; prediction layers: vLLM, ``models/deepseek_mtp.py``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from tp3.pad.families.config import Config
from tp3.pad.families.llama import NO_GATE, NO_HEAD, NO_QUERY, NO_TOKEN, NO_UP, NO_WIDTH
from tp3.pad.model import Rule

NO_LATENT = "a dummy head reads keys and values of 0 and returns 0"
LAYER = "model.layers.*."
GATED = ("gate_proj", "up_proj", "down_proj")
Tagged = tuple[str, ...]


def attention(q_lora: bool, at: str = LAYER + "self_attn.", when: Tagged = ()) -> tuple[Rule, ...]:
    """Latent attention. Tag: attention_bias."""
    biased = (*when, "attention_bias")
    queries: tuple[Rule, ...] = (
        Rule(at + "q_proj.weight", ("q_heads*qk_head_dim", "hidden"), NO_QUERY, when),
    )
    if q_lora:
        queries = (
            Rule(at + "q_a_proj.weight", ("q_lora_rank", "hidden"), "", when),
            Rule(at + "q_a_proj.bias", ("q_lora_rank",), "", biased),
            Rule(at + "q_a_layernorm.weight", ("q_lora_rank",), "", when),
            Rule(at + "q_b_proj.weight", ("q_heads*qk_head_dim", "q_lora_rank"), NO_QUERY, when),
        )
    return (
        *queries,
        Rule(at + "kv_a_proj_with_mqa.weight", ("kv_a_rows", "hidden"), "", when),
        Rule(at + "kv_a_proj_with_mqa.bias", ("kv_a_rows",), "", biased),
        Rule(at + "kv_a_layernorm.weight", ("kv_lora_rank",), "", when),
        Rule(at + "kv_b_proj.weight", ("q_heads*kv_b_head", "kv_lora_rank"), NO_LATENT, when),
        Rule(at + "o_proj.weight", ("hidden", "q_heads*v_head_dim"), NO_HEAD, when),
        Rule(at + "o_proj.bias", ("hidden",), "", biased),
    )


def latent_sizes(config: Config) -> dict[str, int]:
    """The sizes that ``attention`` names."""
    nope, lora = config.size("qk_nope_head_dim"), config.size("kv_lora_rank")
    rope, value = count(config, "qk_rope_head_dim"), config.size("v_head_dim")
    sizes = {
        "qk_head_dim": nope + rope,
        "kv_b_head": nope + value,
        "kv_a_rows": lora + rope,
        "kv_lora_rank": lora,
        "v_head_dim": value,
    }
    if config.has("q_lora_rank"):
        sizes["q_lora_rank"] = config.size("q_lora_rank")
    return sizes


def indexer(
    when: Tagged = ("indexer",), at: str = LAYER + "self_attn.indexer."
) -> tuple[Rule, ...]:
    """The indexer of sparse attention: every rank keeps all of its heads."""
    return (
        Rule(at + "wq_b.weight", ("index_heads*index_head_dim", "q_lora_rank"), "", when),
        Rule(at + "wk.weight", ("index_head_dim", "hidden"), "", when),
        Rule(at + "k_norm.weight", ("index_head_dim",), "", when),
        Rule(at + "k_norm.bias", ("index_head_dim",), "", when),
        Rule(at + "weights_proj.weight", ("index_heads", "hidden"), "", when, plain=True),
    )


def indexer_sizes(config: Config) -> dict[str, int]:
    return {
        "index_heads": config.size("index_n_heads"),
        "index_head_dim": config.size("index_head_dim"),
    }


def own_indexers(config: Config, layers: int) -> list[bool]:
    """Which layers have an indexer of their own; the others use that of a layer before.

    Source: Transformers 5.24, ``GlmMoeDsaConfig`` and ``Glm5NextTextConfig``.
    """
    types = config.values.get("indexer_types") or config.values.get("index_topk_pattern")
    if types is not None:
        if len(types) < layers:
            raise ValueError(
                f"{config.at}indexer_types must name {layers} layers, got {len(types)}"
            )
        return [str(kind).lower() in ("full", "f") for kind in types[:layers]]
    every = max(count(config, "index_topk_freq", 1), 1)
    offset = count(config, "index_skip_topk_offset", 2)
    return [max(layer - offset + 1, 0) % every == 0 for layer in range(layers)]


def gated(at: str, width: str, when: Tagged = (), names: Tagged = GATED) -> tuple[Rule, ...]:
    """A gated MLP without biases, of the names gate, up, down."""
    gate, up, down = names
    return (
        Rule(f"{at}{gate}.weight", (width, "hidden"), NO_GATE, when),
        Rule(f"{at}{up}.weight", (width, "hidden"), NO_UP, when),
        Rule(f"{at}{down}.weight", ("hidden", width), NO_WIDTH, when),
    )


def experts(
    at: str = LAYER + "mlp.",
    names: Tagged = GATED,
    when: Tagged = ("moe",),
    *,
    shared_names: Tagged = GATED,
    bias: str = "gate.e_score_correction_bias",
) -> tuple[Rule, ...]:
    """Router, routed experts and shared experts. Tags: router_bias, shared."""
    return (
        Rule(at + "gate.weight", ("experts", "hidden"), "", when, plain=True),
        Rule(at + bias, ("experts",), "", (*when, "router_bias")),
        *gated(at + "experts.#.", "moe_intermediate", when, names),
        *gated(at + "shared_experts.", "shared_intermediate", (*when, "shared"), shared_names),
    )


def predicting(rules: Iterable[Rule], layer: str = LAYER) -> tuple[Rule, ...]:
    """The rules where layers with the tag ``mtp`` follow: those predict a token more.

    They may be absent all together: copies made by Transformers or ModelOpt leave them out.
    """
    out = []
    for rule in rules:
        if rule.pattern.startswith(layer):
            out.append(replace(rule, when=(*rule.when, "!mtp")))
            out.append(replace(rule, when=(*rule.when, "mtp"), spare=True))
        else:
            out.append(rule)
    for name, dims, why in (
        ("enorm", ("hidden",), ""),
        ("hnorm", ("hidden",), ""),
        ("eh_proj", ("hidden", "2*hidden"), ""),
        ("shared_head.norm", ("hidden",), ""),
        ("shared_head.head", ("vocab", "hidden"), "the engine masks the tail of the vocabulary"),
        ("embed_tokens", ("vocab", "hidden"), NO_TOKEN),
    ):
        out.append(Rule(f"{layer}{name}.weight", dims, why, ("mtp",), spare=True, plain=True))
    return tuple(out)


def prefixed(rules: Iterable[Rule], prefix: str) -> tuple[Rule, ...]:
    """The rules of a decoder that is a part of a larger model."""
    return tuple(replace(rule, pattern=prefix + rule.pattern) for rule in rules)


def count(config: Config, name: str, default: int = 0) -> int:
    """An integer that may be 0. Errors: ValueError for anything else."""
    value = config.values.get(name)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{config.at}{name} must be 0 or a positive integer, got {value!r}")
    return value


def paths(config: Config, **names: str) -> dict[str, tuple[str, ...]]:
    """``Model.paths``: for each axis the keys, separated by spaces, that the config has."""
    found = {
        axis: tuple(config.path(key) for key in keys.split() if config.has(key))
        for axis, keys in names.items()
    }
    return {axis: places for axis, places in found.items() if places}


def untouched(*towers: str) -> tuple[Rule, ...]:
    """Parts that every rank keeps as they are; a checkpoint may do without."""
    return tuple(Rule(tower + "**", (), spare=True, plain=True) for tower in towers)


def tower_notes(config: Config, *keys: str) -> tuple[str, ...]:
    """What to say of a vision tower; keys: of its heads."""
    if not config.has("vision_config"):
        return ()
    vision = config.folder("vision_config")
    heads = next((f" ({vision.size(key)} heads)" for key in keys if vision.has(key)), "")
    return (
        f"the vision tower{heads} stays as trained: run it data-parallel where its heads do not "
        "divide by the ranks",
    )
