"""From a config to a plan: families, what may be absent, what is refused; and no torch."""

import json
import subprocess
import sys

import pytest

from tp3.pad.planner import plan
from tp3.pad.shape import Shape, read_config

LLAMA_70B = {
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
MISTRAL_NEMO = LLAMA_70B | {
    "model_type": "mistral",
    "hidden_size": 5120,
    "intermediate_size": 14336,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "head_dim": 128,
    "vocab_size": 131072,
}
QWEN2_7B = LLAMA_70B | {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
}
QWEN3_0_6B = LLAMA_70B | {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        pytest.param(LLAMA_70B, (72, 9, 28674, 128256), id="llama-70b"),
        pytest.param(MISTRAL_NEMO, (36, 9, 14337, 131136), id="mistral-nemo"),
        pytest.param(QWEN2_7B, (42, 6, 18945, 152064), id="qwen2-7b"),
        pytest.param(QWEN3_0_6B, (18, 9, 3072, 152064), id="qwen3-0.6b"),
    ],
)
def test_three_ranks(config, sizes):
    planned = plan(config)
    assert planned.padded_sizes == dict(
        zip(("q_heads", "kv_heads", "intermediate", "vocab"), sizes)
    )
    assert planned.strategy == "append"
    assert all(axis.per_rank * 3 == axis.padded for axis in planned.axes)


@pytest.mark.parametrize(
    ("config", "flags"),
    [
        pytest.param(LLAMA_70B, (False, False, False, False), id="llama"),
        pytest.param(
            LLAMA_70B | {"attention_bias": True, "mlp_bias": True},
            (True, True, True, False),
            id="llama-with-biases",
        ),
        pytest.param(QWEN2_7B, (True, False, False, False), id="qwen2"),
        pytest.param(QWEN3_0_6B, (False, False, False, True), id="qwen3"),
    ],
)
def test_families_say_which_tensors_exist(config, flags):
    shape = Shape.from_config(config)
    assert (shape.qkv_bias, shape.o_bias, shape.mlp_bias, shape.qk_norm) == flags


def test_padded_config_pins_head_dim_and_keeps_the_original_sizes():
    padded = plan(LLAMA_70B).padded_config(LLAMA_70B)
    assert padded["head_dim"] == 128  # 8192 / 72 is not even whole
    assert padded["num_attention_heads"] == 72
    assert padded["tp3"]["stock"]["num_attention_heads"] == 64
    assert "tp3" not in LLAMA_70B


@pytest.mark.parametrize("tp", [2, 3, 5, 6, 7])
@pytest.mark.parametrize("config", [LLAMA_70B, MISTRAL_NEMO, QWEN2_7B, QWEN3_0_6B])
def test_the_plan_of_a_padded_config_is_inert(config, tp):
    again = plan(padded := plan(config, tp=tp).padded_config(config), tp=tp)
    assert again.inert
    assert again.padded_config(padded) == padded


def test_one_rank_needs_nothing():
    config = LLAMA_70B | {"vocab_size": 30003}
    assert plan(config, tp=1).inert
    assert plan(config, tp=1).padded_config(config) == config


def test_llama_1_has_a_kv_head_per_query_head():
    config = {k: v for k, v in LLAMA_70B.items() if k != "num_key_value_heads"}
    assert plan(config).padded_sizes["kv_heads"] == 66


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"model_type": "gpt2"}, "one of llama, mistral, qwen2, qwen3, got 'gpt2'"),
        ({"model_type": None}, "got None"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"vocab_size": "32000"}, "vocab_size must be a positive integer, got '32000'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer, got 0"),
        ({"intermediate_size": True}, "intermediate_size must be a positive integer, got True"),
        ({"num_key_value_heads": 7}, "multiple of num_key_value_heads, got 64 and 7"),
        ({"hidden_size": 8193}, "hidden_size 8193 does not divide by num_attention_heads 64"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false, got 'no'"),
        ({"model_type": "mistral", "num_key_value_heads": None}, "num_key_value_heads is missing"),
        ({"model_type": "qwen3"}, "head_dim is missing"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config must be absent"),
    ],
)
def test_a_bad_config_is_refused_in_one_sentence(change, sentence):
    with pytest.raises(ValueError, match=sentence):
        plan(LLAMA_70B | change)


@pytest.mark.parametrize("tp", [0, -1, 2.0, True, "3"])
def test_a_bad_number_of_ranks_is_refused(tp):
    with pytest.raises(ValueError, match="tp must be a positive integer"):
        plan(LLAMA_70B, tp=tp)


def test_config_is_read_from_a_folder_or_a_file(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA_70B))
    assert read_config(tmp_path) == read_config(file) == LLAMA_70B


@pytest.mark.parametrize(
    ("text", "sentence"),
    [("{", "is not JSON"), ("[1]", "must hold a JSON object, got list"), (None, "no config.json")],
)
def test_a_bad_config_file_is_refused(tmp_path, text, sentence):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=sentence):
        read_config(tmp_path)


def test_a_missing_path_is_refused(tmp_path):
    with pytest.raises(ValueError, match="nowhere does not exist"):
        read_config(tmp_path / "nowhere")


def test_planning_imports_neither_torch_nor_triton():
    code = f"""
import sys
from tp3.pad import plan, read_config
plan({LLAMA_70B!r}).padded_config({LLAMA_70B!r})
import tp3.pad.rules
sys.exit(bool({{"torch", "triton", "numpy"}} & set(sys.modules)))
"""
    subprocess.run([sys.executable, "-c", code], check=True)
