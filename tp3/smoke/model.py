"""A padded model on several ranks against the same model, unpadded, on one: does it say the same?

Tokens must be identical. Logits must be as close to those in fp64 as rounding makes them: at most
twice as far as the one-rank fp32 run is, which is measured in the same call. All three run on the
same kind of device.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tp3.pad import Plan, padded_weights, plan
from tp3.smoke.llama import Llama
from tp3.smoke.rows import Row, row
from tp3.smoke.site import Site
from tp3.smoke.source import Folder, RandomLlama, Source

Prompts = Sequence[Sequence[int]]
QUESTIONS = (
    "What is the capital of France? Answer in one sentence.",
    "Name three primary colours.",
)
MAX_NEW_TOKENS = 16


@dataclass(frozen=True)
class Distance:
    """The largest difference of two runs, over all positions, prompts and vocabulary entries."""

    logit: float
    logprob: float


def compare(
    rank: int,
    world_size: int,
    source: Source,
    prompts: Prompts,
    max_new_tokens: int,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """A rank's greedy `tokens` per prompt, a `digest` of the prompts' logits; rank 0: `logits`.

    fp32 is fp32 here: TF32 is switched off.
    """
    torch.set_float32_matmul_precision("highest")
    config = source.config()
    planned = plan(config, tp=world_size)
    model = Llama(
        planned.padded_config(config),
        padded_weights(source.weights(), planned),
        vocab_size=trained(planned, "vocab"),
        rank=rank,
        world_size=world_size,
        dtype=dtype,
        device=device,
    )
    stop = source.stop()
    runs = [model.generate(list(prompt), max_new_tokens, stop=stop) for prompt in prompts]
    logits = [prompt_logits.cpu().numpy() for _, prompt_logits in runs]
    return {
        "tokens": [tokens for tokens, _ in runs],
        "digest": hashlib.sha256(b"".join(part.tobytes() for part in logits)).hexdigest(),
        "logits": logits if rank == 0 else None,
    }


def distance(left: Sequence[npt.NDArray[Any]], right: Sequence[npt.NDArray[Any]]) -> Distance:
    """Between the logits of two runs on the same prompts, prompt by prompt."""
    return Distance(
        max(float(np.abs(a - b).max()) for a, b in zip(left, right, strict=True)),
        max(
            float(np.abs(_logprobs(a) - _logprobs(b)).max())
            for a, b in zip(left, right, strict=True)
        ),
    )


def run_model(
    world_size: int,
    *,
    backend: str,
    site: Site,
    folder: str | Path | None = None,
    progress: Callable[[str], None] | None = None,
) -> list[Row]:
    """Rows `{"check", "detail", "value", "ok"}`: the plan, then `world_size` ranks against one."""
    tell = progress or (lambda _: None)
    source: Source = Folder(Path(folder)) if folder else RandomLlama()
    planned = plan(source.config(), tp=world_size)
    prompts = _prompts(source, trained(planned, "vocab"))
    tell(f"padded model on {world_size} ranks")
    arguments = (source, prompts, MAX_NEW_TOKENS, site.device)
    ranks = site.launch(compare, world_size, *arguments, backend=backend)
    tell("the same model, unpadded, on one rank, in fp32 and fp64")
    stock, exact = site.alone(_stock_and_exact, source, prompts, site.device)
    return [*_plan_rows(planned), *_result_rows(ranks, stock, exact)]


def _stock_and_exact(
    rank: int, world_size: int, source: Source, prompts: Prompts, device: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    stock = compare(rank, world_size, source, prompts, MAX_NEW_TOKENS, device)
    exact = compare(rank, world_size, source, prompts, 0, device, torch.float64)
    return stock, exact


def trained(planned: Plan, name: str) -> int:
    """The size of an axis as trained."""
    return next(axis.stock for axis in planned.axes if axis.name == name)


def _plan_rows(planned: Plan) -> list[Row]:
    return [
        row(
            f"plan {axis.name}",
            f"{axis.stock} → {axis.padded}, {axis.per_rank} per rank: {axis.reason}",
            axis.padded,
            True,
        )
        for axis in planned.axes
    ]


def _result_rows(
    ranks: list[dict[str, Any]], stock: dict[str, Any], exact: dict[str, Any]
) -> list[Row]:
    same_tokens = all(rank["tokens"] == stock["tokens"] for rank in ranks)
    same_logits = len({rank["digest"] for rank in ranks}) == 1
    lengths = " + ".join(str(len(tokens)) for tokens in stock["tokens"])
    apart = distance(ranks[0]["logits"], stock["logits"])
    error = distance(ranks[0]["logits"], exact["logits"])
    rounding = distance(stock["logits"], exact["logits"])
    limits = (
        f"to fp64: {error.logit:.1e}, allowed 2 × {rounding.logit:.1e}",
        f"to fp64: {error.logprob:.1e}, allowed 2 × {rounding.logprob:.1e}",
    )
    return [
        row("model tokens", f"{lengths} greedy tokens, TP=1's", same_tokens, same_tokens),
        row("model ranks", "logits bit-identical on every rank", same_logits, same_logits),
        row("model max |Δ logit|", limits[0], apart.logit, error.logit <= 2 * rounding.logit),
        row(
            "model max |Δ logprob|", limits[1], apart.logprob, error.logprob <= 2 * rounding.logprob
        ),
    ]


def _prompts(source: Source, vocab: int) -> Prompts:
    """The questions in the model's chat format; without a tokenizer, fixed numbers."""
    tokenizer = _tokenizer(source)
    if tokenizer:
        return [chat_tokens(tokenizer, question) for question in QUESTIONS]
    return [[(step * index * 7919 + 11) % vocab for index in range(24)] for step in (1, 3)]


def _tokenizer(source: Source) -> Any:
    if not isinstance(source, Folder) or find_spec("transformers") is None:
        return None
    if not (source.path / "tokenizer_config.json").exists():
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(source.path)


def chat_tokens(tokenizer: Any, question: str) -> list[int]:
    """The tokens of a question, in the tokenizer's chat template if it has one."""
    text = question
    if tokenizer.chat_template:
        message = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    return list(tokenizer.encode(text))


def _logprobs(logits: npt.NDArray[Any]) -> npt.NDArray[Any]:
    wide = logits.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(-1, keepdims=True))
    return wide
