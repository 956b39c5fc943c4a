"""Speculative decoding: the draft is padded with its target, and as often right."""

from __future__ import annotations

import pytest

from tests.vllm import fleet, models

pytestmark = pytest.mark.timeout(900)
DRAFTED = "vllm:spec_decode_num_draft_tokens"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"


METHODS = ("draft", "mtp")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """For each method the target alone and with what drafts for it."""
    root = tmp_path_factory.mktemp("pairs")
    llama = models.save("llama", root / "llama")
    other = models.save_draft(llama, root / "draft")
    deepseek = models.save_predicting(root / "deepseek")
    options = {
        "draft": {"model": str(llama)},
        "mtp": {"model": str(deepseek), **models.ENGINE["deepseek_v3"]},
    }
    speculative = {
        "draft": {"model": str(other), "num_speculative_tokens": 3, "method": "draft_model"},
        "mtp": {"num_speculative_tokens": 1, "method": "mtp", "attention_backend": "CPU_MLA"},
    }
    made = {}
    for name in METHODS:
        common = {**options[name], "disable_log_stats": False}
        made[name + " alone"] = common
        made[name] = {**common, "speculative_config": speculative[name]}
    return made


@pytest.fixture(scope="module")
def stock(pairs, tmp_path_factory):
    return fleet.run(tmp_path_factory.mktemp("stock"), pairs)


@pytest.fixture(scope="module")
def padded(pairs, tmp_path_factory):
    return fleet.run(tmp_path_factory.mktemp("padded"), pairs, tp=3)


@pytest.mark.parametrize("name", METHODS)
def test_the_same_tokens_and_the_same_acceptance(stock, padded, name):
    for said in (stock[name], padded[name + " alone"], padded[name]):
        apart, worst = fleet.differences(stock[name + " alone"], said)
        assert (apart, worst < 1e-4) == (0, True)
    drafted = stock[name]["drafted"]
    assert padded[name]["drafted"] == drafted
    assert 0 < drafted[ACCEPTED] < drafted[DRAFTED]
