"""`verify`: holds for right plans, sees wrong ones, and says what it cannot compare."""

from dataclasses import replace

import pytest
import torch
from transformers import CONFIG_MAPPING

from tests.pad.folders import CONFIG, save
from tp3.pad import padded_weights, plan, read_weights
from tp3.pad import verify as module
from tp3.pad.spread import picked
from tp3.pad.verify import audit, verify

torch.set_num_threads(1)
SIXTEEN = CONFIG | {
    "model_type": "mistral",
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "sliding_window": None,
}
FAMILIES = {
    "llama": CONFIG | {"attention_bias": True, "mlp_bias": True},
    "mistral": CONFIG | {"model_type": "mistral", "head_dim": 8, "sliding_window": None},
    "qwen2": CONFIG | {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": CONFIG | {"model_type": "qwen3", "head_dim": 8},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_random_weights_of_a_config(family, tmp_path):
    found = verify(tmp_path / "config.json", FAMILIES[family], tp=3)
    assert found.ok, found
    assert found.layers == 2
    assert found.zeros > 10_000
    assert found.bound == 2 * found.rounding > 0


def in_full(model_type):
    """A small config with all that Transformers would write."""
    small = {
        **CONFIG,
        "model_type": model_type,
        "hidden_size": 96,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "num_hidden_layers": 2,
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
    }
    if model_type != "olmo2":
        small |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    small = {key: value for key, value in small.items() if key != "architectures"}
    return {**CONFIG_MAPPING[model_type](**small).to_dict(), "model_type": model_type}


@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss", "olmo2", "minimax_m2"])
def test_experts_sinks_and_norms_over_all_heads(model_type, tmp_path):
    found = verify(tmp_path, in_full(model_type), tp=3)
    assert found.ok, found
    assert found.zeros > 10_000


@pytest.mark.parametrize("model_type", ["olmo2", "minimax_m2"])
def test_control_a_norm_without_its_eps_is_seen(model_type, monkeypatch, tmp_path):
    config = in_full(model_type) | {"rms_norm_eps": 0.1}
    assert verify(tmp_path, config, tp=3).ok
    monkeypatch.setattr(module, "eps_factors", lambda model, spreads: {})
    assert not verify(tmp_path, config, tp=3).ok


@pytest.mark.parametrize(
    ("tp", "strategy", "zeros"),
    [(6, "in-group", True), (4, "split-group", False), (3, "append", True)],
)
def test_every_way_to_pad_heads(tmp_path, tp, strategy, zeros):
    found = verify(tmp_path, SIXTEEN, tp=tp, strategy=strategy)
    assert found.ok, found
    assert found.zeros > 0


@pytest.mark.parametrize(("layers", "expected"), [(None, 3), (1, 1)])
def test_a_folder_by_its_own_weights(tmp_path, layers, expected):
    found = verify(save(tmp_path), CONFIG, tp=5, layers=layers)
    assert found.ok, found
    assert found.layers == expected


def test_control_a_wrong_map_is_seen(monkeypatch, tmp_path):
    """Query heads 0 and 1 change places; each still fits."""

    def swapped(config, **options):
        right = plan(config, **options)
        sources = list(right.spreads["q_heads"].sources)
        sources[0], sources[2] = sources[2], sources[0]
        return replace(right, spreads={**right.spreads, "q_heads": picked(22, sources)})

    monkeypatch.setattr(module, "plan", swapped)
    found = verify(tmp_path, CONFIG, tp=3)
    assert not found.ok
    assert found.error > 100 * found.bound
    assert not found.wrong  # the weights are what that plan says


def test_control_a_padding_that_is_not_zero_is_seen(monkeypatch, tmp_path):
    name = "model.layers.1.self_attn.o_proj.weight"

    def off(weights, planned):
        for key, tensor in padded_weights(weights, planned):
            if key == name:
                tensor[0, -1] = 1e-30
            yield key, tensor

    monkeypatch.setattr(module, "padded_weights", off)
    found = verify(tmp_path, CONFIG, tp=3)
    assert (found.wrong, found.ok) == ((name,), False)


def test_control_a_padded_token_with_a_logit_is_seen(monkeypatch, tmp_path):
    def off(weights, planned):
        for key, tensor in padded_weights(weights, planned):
            if key == "lm_head.weight":
                tensor[-1] = 1
            yield key, tensor

    monkeypatch.setattr(module, "padded_weights", off)
    found = verify(tmp_path, CONFIG, tp=3)
    assert found.tail > 0
    assert not found.ok


def test_the_audit_counts_padded_entries(tmp_path):
    planned = plan(CONFIG, tp=3)
    stock = dict(read_weights(save(tmp_path)))
    padded = dict(padded_weights(stock.items(), planned))
    count, wrong = audit(planned, stock, padded)
    assert count == sum(tensor.numel() - stock[name].numel() for name, tensor in padded.items())
    assert wrong == ()


@pytest.mark.parametrize(
    ("change", "options", "sentence"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, {}, "those of .* are quantised"),
        ({"tp3": {}}, {}, "is padded already"),
        ({}, {"layers": 4}, r"layers must be in 1..3, got 4"),
        ({}, {"layers": 0}, r"layers must be in 1..3, got 0"),
        ({}, {"tp": 0}, "tp must be a positive integer, got 0"),
        ({"model_type": 5}, {}, "model_type must be a string, got 5"),
        ({"hidden_size": 90, "head_dim": 4}, {}, r"refuses the config: .*\(90\)"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path, change, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        verify(tmp_path, CONFIG | change, **{"tp": 3, **options})
