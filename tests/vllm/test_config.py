"""Widening config objects such as vLLM holds, without vLLM."""

from types import SimpleNamespace

import pytest

from tests.vllm.models import CONFIGS
from tp3.vllm.config import changes, widen
from tp3.vllm.plans import KEY, engine_plan, planned_for
from tp3.vllm.source import merged


def held(config):
    """A model config of vLLM's with one Transformers config, or one that holds the text's."""
    whole = SimpleNamespace(**config)
    text = whole
    if isinstance(config.get("text_config"), dict):
        text = whole.text_config = SimpleNamespace(**config["text_config"])
    return SimpleNamespace(hf_config=whole, hf_text_config=text, get_model_arch_config=lambda: None)


def test_sizes_are_written_in_place():
    config = CONFIGS["qwen2"]
    model = held(config)
    widen(model, engine_plan(config, 3), config)
    found = model.hf_config
    assert (found.num_attention_heads, found.num_key_value_heads) == (12, 6)
    assert (found.head_dim, found.hidden_size // found.num_attention_heads) == (32, 32)
    assert found.vocab_size == 515
    assert planned_for(model) == engine_plan(config, 3)


def test_a_text_config_is_reached():
    text = {**CONFIGS["gemma3"], "model_type": "gemma3_text"}
    config = {"model_type": "gemma3", "text_config": text, "tie_word_embeddings": True}
    model = held(config)
    widen(model, engine_plan(config, 3), config)
    assert model.hf_config.text_config.num_attention_heads == 12
    assert model.hf_config.tp3 == model.hf_text_config.tp3
    assert not hasattr(model.hf_config, "num_attention_heads")


def test_a_text_config_that_is_a_copy_is_widened_too():
    text = CONFIGS["gemma3"]
    config = {"model_type": "gemma3", "text_config": text}
    model = held(config)
    model.hf_text_config = SimpleNamespace(**text)
    widen(model, engine_plan(config, 3), config)
    assert model.hf_config.text_config.num_key_value_heads == 6
    assert model.hf_text_config.num_key_value_heads == 6


def test_an_override_of_a_padded_size_is_refused():
    config = CONFIGS["llama"]
    model = held({**config, "num_key_value_heads": 2})
    with pytest.raises(ValueError, match="num_key_value_heads = 4 and vLLM's 2"):
        widen(model, engine_plan(config, 3), config)


def test_changes_are_places_that_differ():
    raw = {"a": 1, "b": {"c": 2, "d": 3}}
    padded = {"a": 1, "b": {"c": 4, "d": 3}, "e": 5}
    assert list(changes(raw, padded)) == [("b.c", 2, 4), ("e", None, 5)]


def test_overrides_are_merged_folder_by_folder():
    assert merged({"a": 1, "b": {"c": 2, "d": 3}}, {"b": {"c": 5}}) == {
        "a": 1,
        "b": {"c": 5, "d": 3},
    }


def test_the_mark_is_json():
    import json

    config = CONFIGS["minimax_m2"]
    model = held(config)
    widen(model, engine_plan(config, 3), config)
    assert json.loads(json.dumps(getattr(model.hf_config, KEY))) == model.hf_config.tp3
