"""The plan as vLLM needs it, and how it travels in the config."""

import json
from types import SimpleNamespace

import pytest

from tests.vllm.models import CONFIGS
from tp3.vllm.plans import KEY, engine_plan, mark_of, planned_for


@pytest.mark.parametrize("tp", [3, 5, 6, 7])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_vocabulary_is_left_to_the_engine(name, tp):
    planned = engine_plan(CONFIGS[name], tp)
    assert planned.spreads["vocab"].inert
    assert planned.padded_sizes["vocab"] == 515
    assert planned.padded_config(CONFIGS[name])["vocab_size"] == 515
    assert not planned.inert


def test_norms_that_share_an_epsilon_get_equal_factors():
    config = {**CONFIGS["minimax_m2"], "num_attention_heads": 16, "num_key_value_heads": 2}
    factors = engine_plan(config, 6).padded_config(config)[KEY]["norm_eps_factors"]
    assert len(factors) == 2
    assert len(set(factors.values())) == 1


def test_every_process_plans_the_same():
    config = CONFIGS["llama-16q2kv"]
    mark = {"tp": 6, "config": config}
    held = SimpleNamespace(hf_config=SimpleNamespace(tp3=json.loads(json.dumps(mark))))
    assert planned_for(held) == engine_plan(config, 6)


def test_a_stock_config_has_no_mark():
    """Nor has a checkpoint that `tp3 pad` wrote: it needs no padding."""
    assert mark_of(SimpleNamespace(hf_config=SimpleNamespace())) is None
    written = SimpleNamespace(tp3={"tp": 3, "strategy": "append", "stock": {}})
    assert mark_of(SimpleNamespace(hf_config=written)) is None
