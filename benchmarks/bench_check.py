"""How long `tp3 check` takes on 100,000 tensors, of which only the headers exist.

    python benchmarks/bench_check.py

A Mixtral of 60 layers with 554 experts each in 64 shards. The files are sparse: their data is a
hole. Prints the median of five runs of the whole command.
"""

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tp3.pad.headers import INDEX, Stored, encode_header, num_bytes

TP3 = "import sys; from tp3.cli.main import main; main(['check', sys.argv[1]])"

LAYERS, EXPERTS, SHARDS, REPEATS, LIMIT_S = 60, 554, 64, 5, 2.0
CONFIG = {
    "model_type": "mixtral",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_local_experts": EXPERTS,
    "vocab_size": 1000,
}
PER_MODEL = {
    "model.embed_tokens.weight": (1000, 64),
    "model.norm.weight": (64,),
    "lm_head.weight": (1000, 64),
}
PER_LAYER = {
    "input_layernorm.weight": (64,),
    "post_attention_layernorm.weight": (64,),
    "self_attn.q_proj.weight": (64, 64),
    "self_attn.k_proj.weight": (32, 64),
    "self_attn.v_proj.weight": (32, 64),
    "self_attn.o_proj.weight": (64, 64),
    "block_sparse_moe.gate.weight": (EXPERTS, 64),
}
PER_EXPERT = {"w1.weight": (160, 64), "w2.weight": (64, 160), "w3.weight": (160, 64)}


def write(folder: Path) -> int:
    """The folder; returns its number of tensors."""
    shapes = dict(PER_MODEL)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        shapes.update({at + name: shape for name, shape in PER_LAYER.items()})
        for expert in range(EXPERTS):
            place = f"{at}block_sparse_moe.experts.{expert}."
            shapes.update({place + name: shape for name, shape in PER_EXPERT.items()})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    names, placed = list(shapes), {}
    for shard in range(SHARDS):
        file = f"model-{shard:05}.safetensors"
        tensors, at = {}, 0
        for name in names[shard::SHARDS]:
            end = at + num_bytes("BF16", shapes[name])
            tensors[name] = Stored("BF16", shapes[name], at, end)
            placed[name] = file
            at = end
        with (folder / file).open("wb") as out:
            out.truncate(out.write(encode_header(tensors, {"format": "pt"})) + at)
    (folder / INDEX).write_text(json.dumps({"weight_map": placed}))
    return len(names)


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        count = write(Path(scratch))
        seconds = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            ran = subprocess.run(
                [sys.executable, "-c", TP3, scratch], capture_output=True, text=True
            )
            seconds.append(time.perf_counter() - start)
            assert ran.returncode == 0, ran.stderr
        busy = resource.getrusage(resource.RUSAGE_CHILDREN)
    padded, kept = [int(word) for word in ran.stdout.split() if word.isdecimal()][-2:]
    assert padded + kept == count, ran.stdout
    total, spread = statistics.median(seconds), max(seconds) - min(seconds)
    verdict = "ok" if total < LIMIT_S else "TOO SLOW"
    print(
        f"{count} tensors in {SHARDS} files: {total:.2f} s (spread {spread:.2f} s, processor "
        f"{(busy.ru_utime + busy.ru_stime) / REPEATS:.2f} s), {verdict}"
    )


if __name__ == "__main__":
    main()
