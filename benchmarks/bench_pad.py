"""What padding costs: `tp3 pad` against copying the files, `padded_weights` against reading them.

    python benchmarks/bench_pad.py [FOLDER] [--gib 2] [--tp 3]

A Llama of random bf16 weights in four shards, of which every matrix grows, is made in FOLDER (a
temporary one by default). Copies and padded copies are both synced to disk. An engine is stood in
for by copying each tensor into memory that is there already, as a parameter is, once with the files
in the page cache and once from disk. The ways take turns; medians, and the ratios of medians.
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from tp3.pad import padded_weights, plan, read_config, read_weights
from tp3.pad.offline import pad_checkpoint

HIDDEN, WIDTH, HEADS, KV_HEADS, HEAD_DIM, SHARDS, REPEATS = 2048, 7168, 16, 8, 128, 4, 5
MATRICES = {
    "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
    "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
    "mlp.gate_proj": (WIDTH, HIDDEN),
    "mlp.up_proj": (WIDTH, HIDDEN),
    "mlp.down_proj": (HIDDEN, WIDTH),
}


def make(folder: Path, gib: float) -> None:
    each = 2 * sum(n * k for n, k in MATRICES.values())
    layers = max(SHARDS, round(gib * 2**30 / each))
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": WIDTH,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": 1000,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator, placed = torch.Generator().manual_seed(0), {}
    for shard in range(SHARDS):
        tensors = {}
        for layer in range(shard, layers, SHARDS):
            at = f"model.layers.{layer}."
            for name, shape in MATRICES.items():
                values = torch.randint(0, 1 << 14, shape, dtype=torch.int16, generator=generator)
                tensors[f"{at}{name}.weight"] = values.view(torch.bfloat16)
            for norm in ("input_layernorm", "post_attention_layernorm"):
                tensors[f"{at}{norm}.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
        if shard == 0:
            tensors["model.embed_tokens.weight"] = torch.ones(1000, HIDDEN, dtype=torch.bfloat16)
            tensors["model.norm.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
        file = f"model-{shard + 1:05}-of-{SHARDS:05}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        placed.update(dict.fromkeys(tensors, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))


def copied(source: Path, target: Path) -> None:
    target.mkdir()
    for file in source.glob("*.safetensors"):
        with open(shutil.copyfile(file, target / file.name), "rb+") as out:
            os.fsync(out.fileno())


def loaded(weights, room: torch.Tensor) -> None:
    for _, tensor in weights:
        room[: tensor.numel()].view(tensor.shape).copy_(tensor)


def forget(folder: Path) -> None:
    """Drop the files from the page cache."""
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as handle:
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--tp", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as scratch:
        source, target = Path(scratch) / "source", Path(scratch) / "target"
        source.mkdir()
        make(source, args.gib)
        config = read_config(source)
        planned = plan(config, tp=args.tp)
        room = torch.zeros(2 * HIDDEN * WIDTH, dtype=torch.bfloat16)
        plain = lambda: loaded(read_weights(source), room)  # noqa: E731
        padded = lambda: loaded(padded_weights(read_weights(source), planned), room)  # noqa: E731
        ways = {
            "copy": lambda: copied(source, target),
            "pad": lambda: pad_checkpoint(source, target, config, planned),
            "read": plain,
            "read, padded": padded,
            "read from disk": plain,
            "read from disk, padded": padded,
        }
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(1 + REPEATS):
            for name, run in ways.items():
                os.sync()
                if "disk" in name:
                    forget(source)
                start = time.perf_counter()
                run()
                if turn:
                    seconds[name].append(time.perf_counter() - start)
                shutil.rmtree(target, ignore_errors=True)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    for name, values in seconds.items():
        print(f"{name:22} {median[name]:6.2f} s  ({min(values):.2f} to {max(values):.2f})")
    print(f"tp3 pad runs at {median['copy'] / median['pad']:.2f} of the speed of a copy")
    for way in ("read", "read from disk"):
        print(f"{way}: padded_weights costs {median[way + ', padded'] / median[way]:.2f} of plain")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"peak of the process {peak:.2f} GiB, mapped files included")


if __name__ == "__main__":
    main()
