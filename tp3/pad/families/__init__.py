"""Readers of configs, one file per kin of model; a new ``model_type`` is a row of ``READERS``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from tp3.pad.model import Model

READERS = {
    "llama": "dense:read",
    "mistral": "dense:read",
    "mistral3": "dense:read",
    "qwen2": "dense:read",
    "qwen3": "dense:read",
    "qwen3_vl": "dense:read",
    "mimo": "dense:read",
    "smollm3": "dense:read",
    "seed_oss": "dense:read",
    "glm4": "dense:read",
    "phi3": "dense:read",
    "olmo2": "dense:read",
    "olmo3": "dense:read",
    "cohere2": "dense:read",
    "gemma2": "dense:read",
    "gemma3": "dense:read",
    "gemma3_text": "dense:read",
    "ernie4_5": "dense:read",
    "hunyuan_v1_dense": "dense:read",
    "mixtral": "mixture:read",
    "qwen2_moe": "mixture:read",
    "qwen3_moe": "mixture:read",
    "qwen3_vl_moe": "mixture:read",
    "glm4_moe": "mixture:read",
    "ernie4_5_moe": "mixture:read",
    "hunyuan_v1_moe": "mixture:read",
    "olmoe": "mixture:read",
    "flex_olmo": "mixture:read",
    "minimax_m2": "mixture:read",
    "qwen3_next": "qwen:read",
    "qwen3_5": "qwen:read",
    "qwen3_5_text": "qwen:read",
    "qwen3_5_moe": "qwen:read",
    "qwen3_5_moe_text": "qwen:read",
    "gemma4": "gemma:read",
    "gemma4_text": "gemma:read",
    "llama4": "llama4:read",
    "llama4_text": "llama4:read",
    "gpt_oss": "gpt_oss:read",
    "minimax_m3": "minimax:read",
    "minimax_m3_vl": "minimax:read",
    "mimo_v2_flash": "mimo:read",
    "step3p5": "step:read",
    "step3p7": "step:read",
    "deepseek_v2": "deepseek:read",
    "deepseek_v3": "deepseek:read",
    "deepseek_v32": "deepseek:read",
    "kimi_k2": "deepseek:read",
    "glm4_moe_lite": "deepseek:read",
    "glm_moe_dsa": "deepseek:read",
    "deepseek_v4": "deepseek_v4:read",
    "deepseek_ref": "deepseek_v4:read",
    "kimi_linear": "kimi:read_linear",
    "kimi_k25": "kimi:read_k25",
    "glm5_next": "glm5:read",
    "glm5_next_text": "glm5:read",
    "nemotron_h": "nemotron:read",
    "nemotron-nas": "nemotron:refuse_nas",
    "bamba": "hybrid:read",
    "falcon_h1": "hybrid:read",
    "granitemoehybrid": "hybrid:read",
}


# What a config must say, and what no Llama has, for an unknown model_type to be planned as one.
LLAMA_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_hidden_layers",
    "vocab_size",
)
FOREIGN = re.compile("expert|moe|lora_rank|mamba|ssm|linear_|conv|state_size|_config$|alibi|swa_")
KNOWN_FOLDERS = ("quantization_config", "generation_config")


def read_model(config: Mapping[str, Any]) -> Model:
    """The model that a config describes. Errors: ValueError names what is not understood."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise ValueError(f"model_type must be a string, got {model_type!r}")
    place = READERS.get(model_type) or _llama_like(model_type, config)
    module, function = place.split(":")
    model: Model = getattr(import_module(f"{__name__}.{module}"), function)(config)
    return model


def _llama_like(model_type: str, config: Mapping[str, Any]) -> str:
    missing = [key for key in LLAMA_KEYS if config.get(key) is None]
    foreign = sorted(key for key in config if FOREIGN.search(key) and key not in KNOWN_FOLDERS)
    if missing or foreign:
        why = f"has {foreign[0]}, which Llama has not" if foreign else f"lacks {missing[0]}"
        raise ValueError(
            f"model_type must be one of {', '.join(sorted(READERS))}, got {model_type!r}, whose "
            f"config {why}"
        )
    return "dense:read_unknown"
