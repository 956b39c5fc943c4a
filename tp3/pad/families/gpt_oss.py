"""gpt-oss: sinks, biases everywhere, all experts of a layer in one tensor.

A padded head's sink is 0: its softmax is finite and its values are 0 (minus infinity would give NaN
on a fully masked tile). gate_up_proj interleaves gate and up by column, so two entries make one
unit; a dummy column gives glu(0) * (0 + 1) = 0. In bf16 experts are [E, H, 2I] and [E, I, H]; in
MXFP4 the files hold [E, 2I, H] and [E, H, I] as ``_blocks`` and ``_scales``, whose last dimension
is what the blocks divide. Source: Transformers 5.24 and the config of openai/gpt-oss-20b.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tp3.pad.families import llama, moe
from tp3.pad.families.config import Config
from tp3.pad.families.decoder import Kin, decoder
from tp3.pad.model import Model, Rule

KIN = Kin("attention_bias!", "attention_bias!")
NO_SINK = "values of 0 whatever the sink takes; the softmax stays finite"


def read(values: Mapping[str, Any]) -> Model:
    """The model of a gpt-oss config."""
    config, layer = Config(values), KIN.layer
    rules = (
        *llama.frame(),
        *llama.attention(layer),
        Rule(layer + "self_attn.sinks", ("q_heads",), NO_SINK, fill=0.0),
        *llama.norms(layer),
        *moe.router(
            layer + "mlp.",
            (("router.weight", ("experts", "hidden")), ("router.bias", ("experts",))),
        ),
        *_experts(layer + "mlp.experts.", _is_mxfp4(values)),
    )
    return decoder(
        values,
        KIN,
        rules,
        widths={"moe_intermediate": "intermediate_size"},
        sizes={"experts": config.size("num_local_experts")},
    )


def _is_mxfp4(values: Mapping[str, Any]) -> bool:
    return Config(values).inner("quantization_config").values.get("quant_method") == "mxfp4"


def _experts(at: str, rows_first: bool) -> tuple[Rule, ...]:
    width = "moe_intermediate"
    gate_up, down = (f"2*{width}", "hidden"), ("hidden", width)
    if not rows_first:
        gate_up, down = gate_up[::-1], down[::-1]
    return (
        Rule(at + "gate_up_proj", ("experts", *gate_up), llama.NO_GATE),
        Rule(at + "gate_up_proj_bias", ("experts", f"2*{width}"), llama.NO_GATE, plain=True),
        Rule(at + "down_proj", ("experts", *down), llama.NO_WIDTH),
        Rule(at + "down_proj_bias", ("experts", "hidden"), plain=True),
    )
