"""A tiny gpt-oss whose experts are stored in MXFP4, and what its weights mean beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.vllm import models

# Three ranks get whole blocks at 480, 160 to each, which vLLM's Triton kernel rounds up to 192 and
# Marlin to 256.
SIZES = {"hidden_size": 128, "intermediate_size": 448}
QUANTISED = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


def save(folder: Path, **changes: Any) -> Path:
    """The checkpoint, bf16 beside its experts; in ``dense`` the dequantised one."""
    import torch
    from safetensors.torch import load_file, save_file

    from tp3.kernels.reference import mxfp4

    dense = models.save("gpt_oss", folder / "dense", **{**SIZES, **changes})
    plain, made = load_file(dense / "model.safetensors"), {}
    generator = torch.Generator().manual_seed(3)
    for name, tensor in plain.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            made[name] = tensor.to(torch.bfloat16)
            plain[name] = made[name].float()
            continue
        experts, columns, rows = tensor.shape  # Transformers keeps them as [E, K, N]
        grid = (experts, rows, columns // 32)
        codes = torch.randint(0, 256, (*grid, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(121, 124, grid, generator=generator, dtype=torch.uint8)
        made |= {name + "_blocks": codes, name + "_scales": scales}
        plain[name] = mxfp4(codes.flatten(-2), scales, torch.float32).mT.contiguous()
    save_file(plain, dense / "model.safetensors", {"format": "pt"})
    save_file(made, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((dense / "config.json").read_text())
    config |= {"quantization_config": QUANTISED, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
