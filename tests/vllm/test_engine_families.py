"""Padded models on three and more ranks against the stock model on one, in vLLM, greedy, fp32.

Only the models of the tests that are asked for are run: `-k` leaves out those that an older vLLM's
CPU build does not take.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm import fleet, models

WIDE = ("llama", "qwen3", "qwen3_moe")
SIZES = (5, 6, 7)
IN_GROUP = "llama-16q2kv"
TOLERANCE = 1e-4  # of a log-probability in fp32

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="session")
def arguments(request, tmp_path_factory):
    """What ``LLM`` is given for each model, whose checkpoint is made here."""
    items = [item for item in request.session.items if item.path == Path(__file__)]
    asked = {item.callspec.params["name"] for item in items if hasattr(item, "callspec")}
    asked |= {IN_GROUP for item in items if item.function is test_copied_kv_heads}
    root = tmp_path_factory.mktemp("models")
    return {
        name: {"model": str(models.save(name, root / name)), **models.ENGINE.get(name, {})}
        for name in models.CONFIGS
        if name in asked
    }


@pytest.fixture(scope="session")
def stock(arguments, tmp_path_factory):
    return fleet.run(tmp_path_factory.mktemp("stock"), arguments)


@pytest.fixture(scope="session")
def on_three(arguments, tmp_path_factory):
    return fleet.run(tmp_path_factory.mktemp("three"), arguments, tp=3)


@pytest.fixture(scope="session")
def on_more(arguments, tmp_path_factory):
    """WIDE on each size, and two KV heads on six ranks, which are copied."""
    found = {}
    for tp in SIZES:
        names = (*WIDE, IN_GROUP) if tp == 6 else WIDE
        chosen = {name: arguments[name] for name in names if name in arguments}
        found[tp] = fleet.run(tmp_path_factory.mktemp(f"on{tp}"), chosen, tp=tp)
    return found


def same(stock, padded):
    assert padded["mark"], "the model was not padded"
    apart, worst = fleet.differences(stock, padded)
    assert apart == 0
    assert worst < TOLERANCE
    counts = padded["stats"]
    assert sum(n for name, n in counts.items() if name.startswith("all_reduce/")) >= fleet.TOKENS
    assert sum(n for name, n in counts.items() if name.startswith("all_gather/")) >= fleet.TOKENS


@pytest.mark.parametrize("name", models.CONFIGS)
def test_three_ranks(stock, on_three, name):
    same(stock[name], on_three[name])


@pytest.mark.parametrize("name", WIDE)
@pytest.mark.parametrize("tp", SIZES)
def test_more_ranks(stock, on_more, tp, name):
    same(stock[name], on_more[tp][name])


def test_copied_kv_heads(stock, on_more):
    same(stock[IN_GROUP], on_more[6][IN_GROUP])
    assert on_more[6][IN_GROUP]["mark"]["strategy"] == "in-group"


@pytest.mark.parametrize("name", models.CONFIGS)
def test_the_models_say_something(stock, name):
    """Prompts end apart, and no token is certain: else equal tokens would prove little."""
    answers = stock[name]["answers"]
    assert len({tuple(each["tokens"]) for each in answers}) == len(answers)
    assert min(min(each["logprobs"]) for each in answers) < -0.5
