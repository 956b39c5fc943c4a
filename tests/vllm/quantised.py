"""Tiny Llamas whose linear layers are stored as int4, GPTQ or FP8, random as the others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.vllm import models

# Every width is a whole number of quantisation blocks of 128, as released checkpoints are.
WIDE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": 128,
            },
        }
    },
    "ignore": ["lm_head"],
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
FORMATS: dict[str, dict[str, Any]] = {"int4": PACKED, "gptq": GPTQ, "fp8": FP8}
SCALES = {"weight_scale": 0.01, "scales": 0.01, "weight_scale_inv": 0.08}


def save(name: str, folder: Path) -> Path:
    """A Llama in one of ``FORMATS``, and what its weights mean, in fp32, in ``dense`` beside it; a
    weight's scales are drawn between a half and one and a half of ``SCALES``.
    """
    import torch
    from safetensors.torch import load_file, save_file

    from tests.pad.storages import Fp8, Gptq, Packed

    storage: Any = {
        "int4": Packed({}),
        "gptq": Gptq({}),
        "fp8": Fp8({}, 128, 128, "weight_scale_inv", ()),
    }[name]
    dense = models.save("llama", folder / "dense", **WIDE)
    generator = torch.Generator().manual_seed(3)
    plain, made = load_file(dense / "model.safetensors"), {}
    for weight, tensor in plain.items():
        if "_proj." not in weight:
            made[weight] = tensor
            continue
        parts = storage.make(*tensor.shape, generator)
        for part in SCALES.keys() & parts.keys():
            parts[part] = (parts[part] * SCALES[part]).to(parts[part].dtype)
        plain[weight] = storage.read(parts).float().contiguous()
        for part, value in parts.items():
            made[weight.removesuffix("weight") + part] = value.contiguous()
    save_file(plain, dense / "model.safetensors", {"format": "pt"})
    save_file(made, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((dense / "config.json").read_text())
    config["quantization_config"] = FORMATS[name]
    (folder / "config.json").write_text(json.dumps(config))
    return folder
