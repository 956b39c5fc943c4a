"""Tiny random checkpoints of Transformers, one per family, with sizes that vLLM's CPU build takes.

Head widths are those of its attention kernels; heads, widths and vocabulary divide by none of the
ranks they are tried on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

DENSE = {
    "vocab_size": 515,
    "hidden_size": 128,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MOE = {
    **DENSE,
    "num_experts": 8,  # vLLM takes no fewer than there are ranks
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 80,
}
LATENT = {
    **{name: value for name, value in DENSE.items() if name != "head_dim"},
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 48,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 80,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}

EPSILON = 0.03  # so large that a norm of two thirds the variance would show if it kept it

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **DENSE},
    "llama-tied": {"model_type": "llama", **DENSE, "tie_word_embeddings": True},
    "llama-8q1kv": {"model_type": "llama", **DENSE, "num_key_value_heads": 1},
    "llama-mha": {"model_type": "llama", **DENSE, "num_key_value_heads": 8},
    "llama-16q2kv": {
        "model_type": "llama",
        **DENSE,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
    },
    "qwen2": {
        "model_type": "qwen2",
        **{name: value for name, value in DENSE.items() if name != "head_dim"},
        "hidden_size": 256,
    },
    "qwen3": {"model_type": "qwen3", **DENSE},
    "mixtral": {"model_type": "mixtral", **MOE},
    "qwen3_moe": {"model_type": "qwen3_moe", **MOE},
    "gemma2": {
        "model_type": "gemma2",
        **DENSE,
        "query_pre_attn_scalar": 32,
        "sliding_window": 16,
        "tie_word_embeddings": True,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        **DENSE,
        "query_pre_attn_scalar": 32,
        "sliding_window": 16,
        "tie_word_embeddings": True,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "phi3": {
        "model_type": "phi3",
        **{name: value for name, value in DENSE.items() if name != "head_dim"},
        "hidden_size": 256,
        "original_max_position_embeddings": 512,
    },
    "glm4": {"model_type": "glm4", **DENSE, "partial_rotary_factor": 0.5},
    "glm4_moe": {
        "model_type": "glm4_moe",
        **MOE,
        "n_routed_experts": 6,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "partial_rotary_factor": 0.5,
        "use_qk_norm": True,
        "n_group": 1,
        "topk_group": 1,
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        **MOE,
        "intermediate_size": 160,  # vLLM's kernel takes multiples of 32 on each rank
        "sliding_window": 16,
        "head_dim": 64,
    },
    "deepseek_v2": {
        "model_type": "deepseek_v2",
        **LATENT,
        "topk_method": "greedy",
        "norm_topk_prob": False,
    },
    "deepseek_v3": {"model_type": "deepseek_v3", **LATENT, "topk_method": "noaux_tc"},
    "olmo2": {
        "model_type": "olmo2",
        **{name: value for name, value in DENSE.items() if name != "head_dim"},
        "hidden_size": 256,
        "rms_norm_eps": EPSILON,
    },
    "minimax_m2": {
        "model_type": "minimax_m2",
        **MOE,
        "rms_norm_eps": EPSILON,
        "rotary_dim": 32,
        "scoring_func": "softmax",  # the only one that vLLM's CPU router has without groups
        "use_routing_bias": True,
    },
}

DELTA = {
    **DENSE,
    "layer_types": ["linear_attention", "full_attention"],
    "full_attention_interval": 2,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
# vLLM's CPU kernels of gated delta rules take bf16 alone.
HYBRID: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        "model_type": "qwen3_next",
        **DELTA,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 80,
        "shared_expert_intermediate_size": 80,
    },
    "qwen3_5": {"model_type": "qwen3_5_text", **DELTA},
    "qwen3_5_moe": {
        "model_type": "qwen3_5_moe_text",
        **DELTA,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 80,
        "shared_expert_intermediate_size": 80,
    },
}

# What vLLM's CPU build needs to be told: its latent attention for AMX takes no fp32.
ENGINE: dict[str, dict[str, Any]] = {
    name: {"attention_backend": "CPU_MLA"} for name in ("deepseek_v2", "deepseek_v3")
}

DRAWN = 0.08  # a standard deviation at which logits of two tiny layers differ by whole units


def save(name: str, folder: Path, **changes: Any) -> Path:
    """A random model of ``CONFIGS`` or ``HYBRID``, from one seed, as a checkpoint folder."""
    import torch
    import transformers

    values = {**(CONFIGS | HYBRID)[name], **changes}
    config = transformers.AutoConfig.for_model(**{"initializer_range": DRAWN, **values})
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # biases are drawn as 0 and norms as 1: neither would show
                parameter.add_(torch.randn_like(parameter) * DRAWN)
    model.save_pretrained(folder)
    return folder


def save_draft(target: Path, folder: Path, noise: float = 0.02) -> Path:
    """The target with noise on its weights: a draft that is right now and then."""
    import shutil

    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(target, folder)
    file, generator = folder / "model.safetensors", torch.Generator().manual_seed(2)
    tensors = {
        name: tensor + noise * torch.randn(tensor.shape, generator=generator)
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, {"format": "pt"})
    return folder


def save_predicting(folder: Path) -> Path:
    """A DeepSeek-V3 with a prediction layer, which Transformers does not save.

    The model's first layer does next to nothing and the prediction layer is its second, which sees
    the last token and a little of what came before: it is right now and then.
    """
    import json

    import torch
    from safetensors.torch import load_file, save_file

    save("deepseek_v3", folder, num_nextn_predict_layers=1)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    layers, hidden = LATENT["num_hidden_layers"], LATENT["hidden_size"]
    last, mtp = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
    for name in [name for name in tensors if name.startswith(last)]:
        tensors[mtp + name.removeprefix(last)] = tensors[name].clone()
    for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
        tensors["model.layers.0." + name] *= 0.02
    keeps = torch.eye(hidden)
    tensors |= {
        mtp + "enorm.weight": torch.full((hidden,), DRAWN),
        mtp + "hnorm.weight": torch.ones(hidden),
        mtp + "eh_proj.weight": torch.cat((keeps, 0.02 * keeps), 1),
        mtp + "shared_head.norm.weight": tensors["model.norm.weight"].clone(),
        mtp + "shared_head.head.weight": tensors["lm_head.weight"].clone(),
        mtp + "embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
    }
    save_file(tensors, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["num_nextn_predict_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    return folder
