"""A real model, SmolLM2-135M-Instruct (9 query and 3 KV heads), behind `vllm serve`."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.server import serve

QUESTIONS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "What is 2 + 3?",
    "Name three colours.",
)
START = "The capital of France is"
ROOT = Path(__file__).parents[2]
# 3 divides the model, so that nothing is to do; TP3_TEST_WORLD_SIZES=2,3,4,5,7 runs all.
SIZES = [int(size) for size in os.environ.get("TP3_TEST_WORLD_SIZES", "2,5").split(",")]

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def smollm2():
    spec = importlib.util.spec_from_file_location("smollm2", ROOT / "examples" / "smollm2.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    folder = ROOT / "build" / "smollm2"
    folder.parent.mkdir(exist_ok=True)
    example.convert(folder)
    return folder


def talk(address: str, model: str) -> dict[str, Any]:
    """Chat completions with log-probabilities, a streamed completion, and a plain one."""
    import openai

    client = openai.OpenAI(base_url=address, api_key="none")
    common = {"model": model, "temperature": 0.0, "max_tokens": 40}
    chats = []
    for question in QUESTIONS:
        answer = client.chat.completions.create(
            messages=[{"role": "user", "content": question}], logprobs=True, **common
        )
        (choice,) = answer.choices
        steps = choice.logprobs.content
        chats.append((choice.message.content, [s.token for s in steps], [s.logprob for s in steps]))
    plain = client.completions.create(prompt=START, **common).choices[0].text
    stream = client.completions.create(prompt=START, stream=True, **common)
    pieces = [event.choices[0].text for event in stream if event.choices]
    return {"chats": chats, "plain": plain, "pieces": pieces}


@pytest.fixture(scope="module")
def stock(smollm2, tmp_path_factory):
    with serve(smollm2, tmp_path_factory.mktemp("stock")) as address:
        return talk(address, str(smollm2))


def test_the_stock_model_answers(stock):
    assert "Paris" in stock["chats"][0][0]
    assert len({text for text, _, _ in stock["chats"]}) == len(QUESTIONS)


@pytest.mark.parametrize("tp", SIZES)
def test_the_same_answers_on_any_number_of_ranks(smollm2, stock, tmp_path, tp):
    with serve(smollm2, tmp_path, tp=tp) as address:
        said = talk(address, str(smollm2))
    for (text, tokens, logprobs), (want, stock_tokens, stock_logprobs) in zip(
        said["chats"], stock["chats"], strict=True
    ):
        assert (text, tokens) == (want, stock_tokens)
        assert max(abs(a - b) for a, b in zip(logprobs, stock_logprobs)) < 1e-4
    assert said["plain"] == stock["plain"]
    assert "".join(said["pieces"]) == stock["plain"]
    assert len(said["pieces"]) > 1
    log = (tmp_path / "server.log").read_text()
    assert ("is padded for" in log) == (tp != 3)
    assert ("r4d carries the collectives" in log) == (tp != 3)
