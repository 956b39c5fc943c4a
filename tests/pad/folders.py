"""A small Llama as a folder, whole or in shards; heads and widths divide by none of 2 to 8."""

import json

import torch
from safetensors.torch import save_file

INDEX = "model.safetensors.index.json"
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 88,
    "intermediate_size": 131,
    "num_hidden_layers": 3,
    "num_attention_heads": 22,
    "num_key_value_heads": 11,
    "vocab_size": 333,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
HEAD_DIM = 4


def shapes(config=CONFIG):
    """Name and shape of every tensor."""
    hidden, width = config["hidden_size"], config["intermediate_size"]
    q, kv = (config[f"num_{kind}_heads"] * HEAD_DIM for kind in ("attention", "key_value"))
    found = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        found |= {
            at + "input_layernorm.weight": (hidden,),
            at + "self_attn.q_proj.weight": (q, hidden),
            at + "self_attn.k_proj.weight": (kv, hidden),
            at + "self_attn.v_proj.weight": (kv, hidden),
            at + "self_attn.o_proj.weight": (hidden, q),
            at + "post_attention_layernorm.weight": (hidden,),
            at + "mlp.gate_proj.weight": (width, hidden),
            at + "mlp.up_proj.weight": (width, hidden),
            at + "mlp.down_proj.weight": (hidden, width),
        }
    return found | {
        "model.norm.weight": (hidden,),
        "lm_head.weight": (config["vocab_size"], hidden),
    }


def weights(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return {
        name: (torch.randn(shape, generator=generator) * shape[-1] ** -0.5).to(dtype)
        for name, shape in shapes().items()
    }


def save(folder, tensors=None, *, sharded=True, config=CONFIG):
    """One shard of norms, one for each layer, one for the rest; or a single file."""
    tensors = weights() if tensors is None else tensors
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    if not sharded:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    shards = {}
    for name in tensors:
        kind = "norms" if "norm" in name else name.split(".")[2] if ".layers." in name else "rest"
        shards.setdefault(f"model-{kind}.safetensors", []).append(name)
    for file, names in shards.items():
        part = {name: tensors[name] for name in names}
        save_file(part, folder / file, metadata={"format": "pt"})
    placed = {name: file for file, names in shards.items() for name in names}
    size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size, "total_parameters": 1}, "weight_map": placed}
    (folder / INDEX).write_text(json.dumps(index))
    return folder
