"""Tiny random models with latent attention, delta attention or Mamba, and what they save."""

from __future__ import annotations

import json
import re
from pathlib import Path

TINY = json.loads((Path(__file__).parent / "data/latent_tiny.json").read_text())

# Where Transformers 5.24 saves other names than it loads from the Hub.
HUB_NAMES = {
    "kimi_k25": ((r"^(language_model\.model)\.blocks\.", r"\1.layers."), (r"^model\.mm_", "mm_")),
    "kimi_linear": ((r"block_sparse_moe\.((?:gate|up|down)_proj)", r"mlp.\1"),),
    "deepseek_v4": (
        (r"^model\.hc_head\.", ""),
        (r"^hc_", "hc_head_"),
        (r"^model\.embed_tokens", "embed"),
        (r"^model\.", ""),
        (r"\.attn\.norm\.", ".attn.kv_norm."),
    ),
}


def auto_class(config):
    import transformers

    if "vision_config" in config:
        return transformers.AutoModelForImageTextToText
    return transformers.AutoModelForCausalLM


def save(config, folder):
    """Save a random model of a config; the tensors under the names that the Hub has."""
    import transformers
    from safetensors.torch import load_file

    made = auto_class(config).from_config(transformers.AutoConfig.for_model(**config))
    made.save_pretrained(folder)
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        for pattern, text in HUB_NAMES.get(config["model_type"], ()):
            name = re.sub(pattern, text, name)
        tensors[name] = tensor
    return tensors
