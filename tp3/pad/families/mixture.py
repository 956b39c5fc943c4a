"""Decoders with routed experts. A new ``model_type`` is a row of ``MIXTURES``.

Experts grow in width, ``moe_intermediate``; their number, the router and its biases stay. A shared
expert has a width of its own where the config has a key for it; where its width is a multiple of
``moe_intermediate`` it grows with that, since an engine multiplies.
Sources: the models of Transformers 5.24, and the names that ``save_pretrained`` writes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tp3.pad.families import dense, llama, moe
from tp3.pad.families.config import Config
from tp3.pad.families.decoder import Kin, decoder, nested, text_of
from tp3.pad.model import Model, Rule

_MIXTRAL = ("w1", "w3", "w2")
_BIAS = "e_score_correction_bias"


@dataclass(frozen=True)
class Mixture:
    """How the experts of a ``model_type`` are named and sized.

    experts, width: config keys. block: the module that holds them. router: its tensors. shared: the
    shared expert's module, ``shared_width`` its extent, ``shared_key`` the config key of its own
    width or of how many it stands for. dense: which layers have a plain MLP instead. fused: all
    experts in one tensor. draft: whether layers for multi-token prediction follow the others.
    """

    kin: Kin
    experts: str = "num_experts"
    width: str = "moe_intermediate_size"
    block: str = "mlp."
    names: tuple[str, str, str] = moe.PROJECTIONS
    router: tuple[tuple[str, tuple[str, ...]], ...] = (moe.GATE,)
    shared: str = ""
    shared_key: str = ""
    shared_width: str = ""
    dense: str = "none"
    fused: bool = False
    draft: bool = False


_OWN = "shared_intermediate"
_MANY = "shared*moe_intermediate"
_QWEN3 = dense.KIN["qwen3"]

MIXTURES = {
    "mixtral": Mixture(
        Kin(), "num_local_experts", "intermediate_size", "block_sparse_moe.", _MIXTRAL
    ),
    "qwen2_moe": Mixture(
        Kin("qkv_bias!"),
        router=(moe.GATE, ("shared_expert_gate.weight", ("1", "hidden"))),
        shared="shared_expert",
        shared_key="shared_expert_intermediate_size",
        shared_width=_OWN,
        dense="step",
    ),
    "qwen3_moe": Mixture(_QWEN3, dense="step"),
    "qwen3_vl_moe": Mixture(nested(_QWEN3, "model.visual."), dense="step", fused=True),
    "glm4_moe": Mixture(
        replace(Kin("attention_bias"), qk_norm="head", qk_norm_key="use_qk_norm"),
        "n_routed_experts",
        router=(moe.GATE, (f"gate.{_BIAS}", ("experts",))),
        shared="shared_experts",
        shared_key="n_shared_experts",
        shared_width=_MANY,
        dense="first",
        draft=True,
    ),
    "ernie4_5_moe": Mixture(
        dense.KIN["ernie4_5"],
        "moe_num_experts",
        router=(moe.GATE, (f"moe_statics.{_BIAS}", ("1", "experts"))),
        shared="shared_experts",
        shared_key="moe_num_shared_experts",
        shared_width=_MANY,
        dense="ernie",
    ),
    "hunyuan_v1_moe": Mixture(
        dense.KIN["hunyuan_v1_dense"],
        width="intermediate_size",
        router=(("gate.wg.weight", ("experts", "hidden")),),
        shared="shared_mlp",
        shared_width="moe_intermediate",
    ),
    "olmoe": Mixture(replace(dense.KIN["olmo2"], norms=llama.NORMS), width="intermediate_size"),
    "flex_olmo": Mixture(dense.KIN["olmo2"], width="intermediate_size"),
    "minimax_m2": Mixture(
        Kin(qk_norm="width"),
        "num_local_experts",
        "intermediate_size",
        "block_sparse_moe.",
        _MIXTRAL,
        router=(moe.GATE, (_BIAS, ("experts",))),
    ),
}


def read(values: Mapping[str, Any]) -> Model:
    """The model of a config whose ``model_type`` is a row of ``MIXTURES``."""
    mixture = MIXTURES[values["model_type"]]
    kin, config = mixture.kin, text_of(values, mixture.kin)
    plain = DENSE[mixture.dense](config)
    widths = {"moe_intermediate": mixture.width}
    sizes = {"experts": moe.number_of_experts(config, mixture.experts)}
    if any(plain):
        widths["intermediate"] = "intermediate_size"
    if mixture.shared_width == _OWN:
        widths[_OWN] = mixture.shared_key
    elif mixture.shared_key:
        sizes["shared"] = config.size(mixture.shared_key, 1)
    kinds = (("attention", "dense" if each else "sparse") for each in plain)
    rules = (
        *llama.frame(kin.root, kin.head),
        *llama.attention(kin.layer, names=kin.qk_names),
        *llama.norms(kin.layer, kin.norms),
        *llama.only(llama.mlp(kin.layer + "mlp."), "dense"),
        *llama.only(_sparse(values, mixture, kin.layer), "sparse"),
        *_draft_layers(values, mixture, config),
        # ERNIE's head has a bias where its projections do
        *(
            (Rule("lm_head.bias", ("vocab",), llama.NO_LOGIT, ("mlp_bias",), plain=True),)
            if mixture.dense == "ernie"
            else ()
        ),
    )
    model = decoder(values, kin, rules, widths=widths, layers=kinds, sizes=sizes)
    mirror = "moe_intermediate_size"
    if mixture.width == mirror or not config.has(mirror):
        return model
    mirrored = (*model.paths["moe_intermediate"], config.path(mirror))
    return replace(model, paths={**model.paths, "moe_intermediate": mirrored})


def _sparse(values: Mapping[str, Any], mixture: Mixture, layer: str) -> tuple[Rule, ...]:
    at = layer + mixture.block
    rules = moe.router(at, mixture.router)
    if mixture.fused:
        rules += moe.fused_experts(at + "experts.", transposed=_transposed(values))
    else:
        rules += moe.experts(at + "experts.", mixture.names)
    if mixture.shared:
        rules += llama.mlp(f"{at}{mixture.shared}.", mixture.shared_width)
    return rules


def _transposed(values: Mapping[str, Any]) -> bool:
    """Whether fused experts are [E, H, 2I]: Transformers wrote them so before version 5."""
    return not str(values.get("transformers_version", "4")).startswith("5")


def _draft_layers(values: Mapping[str, Any], mixture: Mixture, config: Config) -> tuple[Rule, ...]:
    """Layers for multi-token prediction, numbered after the others; some savers drop them."""
    rules: list[Rule] = []
    tokens = ("vocab", "hidden")
    count = config.count("num_nextn_predict_layers") if mixture.draft else 0
    for number in range(count):
        layer = f"{mixture.kin.root}layers.{config.size('num_hidden_layers') + number}."
        names = ("enorm", "hnorm", "shared_head.norm", *mixture.kin.norms)
        rules += [*llama.attention(layer), *_sparse(values, mixture, layer)]
        rules += [
            *llama.norms(layer, names),
            Rule(layer + "eh_proj.weight", ("hidden", "2*hidden"), plain=True),
            Rule(layer + "embed_tokens.weight", tokens, llama.NO_TOKEN, plain=True),
            Rule(layer + "shared_head.head.weight", tokens, llama.NO_LOGIT, plain=True),
        ]
    return llama.spare(rules)


def _all(config: Config) -> list[bool]:
    return [True] * config.size("num_hidden_layers")


def _none(config: Config) -> list[bool]:
    return [False] * config.size("num_hidden_layers")


def _step(config: Config) -> list[bool]:
    step, named = config.size("decoder_sparse_step", 1), config.listed("mlp_only_layers") or []
    return [
        number in named or (number + 1) % step != 0
        for number in range(config.size("num_hidden_layers"))
    ]


def _first(config: Config) -> list[bool]:
    first = config.count("first_k_dense_replace")
    return [number < first for number in range(config.size("num_hidden_layers"))]


def _ernie(config: Config) -> list[bool]:
    layers = config.size("num_hidden_layers")
    interval = config.size("moe_layer_interval", 1)
    first, last = _one(config, "moe_layer_start_index", 1), _one(config, "moe_layer_end_index", -1)
    last = layers - 1 if last == -1 else last
    return [(number + 1) % interval != 0 or not first <= number <= last for number in range(layers)]


def _one(config: Config, key: str, default: int) -> int:
    """An index; multimodal configs give one to a modality, text first."""
    value = config.values.get(key)
    if isinstance(value, list) and value:
        value = value[0]
    if value is None:
        return default
    if not isinstance(value, int):
        raise ValueError(f"{config.at}{key} must be the number of a layer, got {value!r}")
    return value


DENSE: dict[str, Callable[[Config], list[bool]]] = {
    "all": _all,
    "none": _none,
    "step": _step,
    "first": _first,
    "ernie": _ernie,
}
