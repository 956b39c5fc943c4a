"""What one process of `bench_vllm` does: make a checkpoint, or boot vLLM once and measure.

    python benchmarks/vllm_row.py make MODEL FOLDER
    python benchmarks/vllm_row.py run JOB.json OUT.json

OUT is written anew after each stage, so that a run which is ended keeps what it had.
"""

import json
import random
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
KEYS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "vocab_size")  # fmt: skip
# Neither the heads nor the widths of the first two divide by 3; those of the third do by 2.
SIZES = {
    "tiny": (128, 176, 2, 8, 4, 32, 515),
    "small": (1024, 2752, 8, 8, 4, 128, 8000),
    "large": (4096, 14336, 16, 32, 8, 128, 32000),
}
SECONDS_OF_A_RATE = 8.0
REPEATS = 3


def shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The tensors of a Llama."""
    hidden, mlp, layers, q, kv, width, vocab = (config[key] for key in KEYS)
    yield "model.embed_tokens.weight", (vocab, hidden)
    yield "lm_head.weight", (vocab, hidden)
    yield "model.norm.weight", (hidden,)
    for i in range(layers):
        at = f"model.layers.{i}."
        for name, heads in (("q", q), ("k", kv), ("v", kv)):
            yield f"{at}self_attn.{name}_proj.weight", (heads * width, hidden)
        yield f"{at}self_attn.o_proj.weight", (hidden, q * width)
        for name in ("gate", "up"):
            yield f"{at}mlp.{name}_proj.weight", (mlp, hidden)
        yield f"{at}mlp.down_proj.weight", (hidden, mlp)
        for name in ("input", "post_attention"):
            yield f"{at}{name}_layernorm.weight", (hidden,)


def make(model: str, folder: str) -> None:
    """A random checkpoint in bf16, whose activations keep their size from layer to layer."""
    import torch
    from safetensors.torch import save_file

    config = {**BASE, **dict(zip(KEYS, SIZES[model], strict=True))}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(1)
    tensors = {}
    for name, shape in shapes(config):
        drawn = torch.randn(shape, device=device)
        if len(shape) == 1:
            drawn = 1 + 0.1 * drawn
        elif name != "model.embed_tokens.weight":
            drawn *= shape[1] ** -0.5
        tensors[name] = drawn.bfloat16().cpu()
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    save_file(tensors, place / "model.safetensors", {"format": "pt"})
    (place / "config.json").write_text(json.dumps(config))  # last: it says that all is there


def run(job_file: str, out: str) -> None:
    """JOB: ``arguments`` of LLM, ``prompts``, ``tokens`` of each answer, ``rates``: numbers of
    streams with ``length`` tokens each.
    """
    job = json.loads(Path(job_file).read_text())
    begun, found = time.monotonic(), {}
    from vllm import LLM

    llm = LLM(**job["arguments"])

    def keep(**more: Any) -> None:
        found.update(more)
        Path(out).write_text(json.dumps(found))

    keep(boot_s=time.monotonic() - begun)
    keep(answers=answers(llm, job["prompts"], job["tokens"]))
    rates: dict[str, list[float]] = {}
    for streams in job["rates"]:
        rates[str(streams)] = rate(llm, streams, job["length"])
        keep(rates=rates)
    keep(done=True)


def answers(llm: Any, prompts: list[list[int]], tokens: int) -> list[dict[str, Any]]:
    """Greedy tokens with their log-probabilities, and those of the prompts after their first."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=tokens, logprobs=1, prompt_logprobs=1,
                            ignore_eos=True, detokenize=False)  # fmt: skip
    asked = [{"prompt_token_ids": each} for each in prompts]
    said = []
    for each in llm.generate(asked, params, use_tqdm=False):
        (one,) = each.outputs
        steps = zip(one.logprobs, one.token_ids, strict=True)
        prompt = zip(each.prompt_logprobs[1:], each.prompt_token_ids[1:], strict=True)
        said.append(
            {
                "tokens": list(one.token_ids),
                "logprobs": [step[token].logprob for step, token in steps],
                "prompt_logprobs": [step[token].logprob for step, token in prompt],
            }
        )
    return said


def rate(llm: Any, streams: int, length: int) -> list[float]:
    """Slowest, median and fastest tokens per second of all streams, their short prompts included;
    fewer turns where one takes long.
    """
    from vllm import SamplingParams

    drawn = random.Random(streams)
    asked = [{"prompt_token_ids": [drawn.randrange(3, 500) for _ in range(16)]}] * streams

    def turn(tokens: int) -> float:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True,
                                detokenize=False)  # fmt: skip
        start = time.perf_counter()
        given = llm.generate(asked, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        assert [len(each.outputs[0].token_ids) for each in given] == [tokens] * streams
        return streams * tokens / seconds

    turn(4)
    begun, rates = time.monotonic(), []
    while len(rates) < REPEATS and time.monotonic() - begun < SECONDS_OF_A_RATE:
        rates.append(turn(length))
    return [min(rates), statistics.median(rates), max(rates)]


if __name__ == "__main__":
    {"make": make, "run": run}[sys.argv[1]](*sys.argv[2:])
