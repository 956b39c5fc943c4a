"""A padded config that Transformers agrees to read. No torch.

``LlamaConfig`` of Transformers 5 refuses a ``hidden_size`` that is no multiple of
``num_attention_heads``, whatever ``head_dim`` says; ``MistralConfig`` does not ask, and without
biases and a sliding window Mistral computes what Llama does (source: Transformers 5.24,
``models/llama/configuration_llama.py`` and both ``modeling`` files).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

BIASES = ("attention_bias", "mlp_bias")
MISTRAL = {
    "model_type": "mistral",
    "architectures": ["MistralForCausalLM"],
    "sliding_window": None,
}


def refused(config: Mapping[str, Any]) -> bool:
    """Whether Transformers would not read this config."""
    return (
        config.get("model_type") == "llama"
        and config["hidden_size"] % config["num_attention_heads"] != 0
    )


def stand_in(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config, as Mistral's where that helps and is the same function."""
    if not refused(config) or any(config.get(bias) for bias in BIASES):
        return dict(config)
    if config.get("architectures", ["LlamaForCausalLM"]) != ["LlamaForCausalLM"]:
        return dict(config)
    return {**{key: value for key, value in config.items() if key not in BIASES}, **MISTRAL}
