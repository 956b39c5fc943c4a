"""Llama 4: all experts of a layer in one tensor, a shared expert of the same width, dense layers
with a width of their own. Layers without rotary embedding have the same tensors.

Source: Transformers 5.24 (experts are [E, H, 2I], gate left of up, and [E, I, H]).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tp3.pad.families import llama, moe
from tp3.pad.families.config import Config
from tp3.pad.families.decoder import Kin, decoder, inside, text_of
from tp3.pad.model import Model

_KIN = Kin("attention_bias", "attention_bias")
KIN = {
    "llama4": inside(_KIN, "vision_model.", "multi_modal_projector."),
    "llama4_text": _KIN,
}


def read(values: Mapping[str, Any]) -> Model:
    """The model of a Llama 4 config."""
    kin = KIN[values["model_type"]]
    config, layer = text_of(values, kin), kin.layer
    sparse = _sparse_layers(config)
    at = layer + "feed_forward."
    count = config.size("num_hidden_layers")
    experts = (
        *moe.router(at, (("router.weight", ("experts", "hidden")),)),
        *moe.fused_experts(at + "experts.", transposed=True),
        *llama.mlp(at + "shared_expert.", "moe_intermediate"),
    )
    rules = (
        *llama.frame(kin.root, kin.head),
        *llama.attention(layer),
        *llama.norms(layer),
        *llama.only(llama.mlp(at), "dense"),
        *llama.only(experts, "sparse"),
    )
    widths = {"moe_intermediate": "intermediate_size"}
    if len(sparse) < count:
        widths["intermediate"] = "intermediate_size_mlp"
    return decoder(
        values,
        kin,
        rules,
        widths=widths,
        layers=(
            ("attention", "sparse" if number in sparse else "dense") for number in range(count)
        ),
        sizes={"experts": config.size("num_local_experts")},
    )


def _sparse_layers(config: Config) -> set[int]:
    named = config.listed("moe_layers")
    if named is not None:
        return set(named)
    step = config.size("interleave_moe_layer_step", 1)
    return set(range(step - 1, config.size("num_hidden_layers"), step))
