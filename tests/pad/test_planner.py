"""From a config to a plan: sizes, pins, choices, what is refused; and no torch."""

import json
import subprocess
import sys

import pytest

from tp3.pad import plan, read_config
from tp3.pad.corrections import eps_factors

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
        pytest.param(LLAMA_70B, (72, 9, 28704, 128256), id="llama-70b"),
        pytest.param(MISTRAL_NEMO, (36, 9, 14352, 131136), id="mistral-nemo"),
        pytest.param(QWEN2_7B, (42, 6, 18960, 152064), id="qwen2-7b"),
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
        ({"model_type": None}, "model_type .*None"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"vocab_size": "32000"}, "vocab_size must be a positive integer, got '32000'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer, got 0"),
        ({"intermediate_size": True}, "intermediate_size must be a positive integer, got True"),
        ({"num_key_value_heads": 7}, "multiple of num_key_value_heads, got 64 and 7"),
        ({"hidden_size": 8193}, "hidden_size 8193 does not divide by num_attention_heads 64"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false, got 'no'"),
        ({"quantization_config": {"quant_method": "gguf"}}, "gguf cannot be padded"),
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


def test_a_config_takes_in_what_modelopt_put_beside_it(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    beside = {"quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    assert plan(read_config(tmp_path)).format.name == "nvfp4"


@pytest.mark.parametrize(
    ("strategy", "tp", "heads"),
    [("append", 6, (24, 3)), ("in-group", 6, (18, 6)), ("auto", 6, (18, 6))],
)
def test_a_strategy_may_be_asked_for(strategy, tp, heads):
    config = LLAMA_70B | {"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128}
    planned = plan(config, tp=tp, strategy=strategy)
    sizes = planned.padded_sizes
    assert (sizes["q_heads"], sizes["kv_heads"]) == heads
    assert planned.padded_config(config)["tp3"]["strategy"] == planned.strategy


def test_heads_that_share_a_block_are_not_parted():
    """head_dim 64 in blocks of 128: two heads move together, or whole groups are appended."""
    config = LLAMA_70B | {
        "num_attention_heads": 20,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }
    for tp in range(2, 9):
        planned = plan(config, tp=tp)
        for name in ("q_heads", "kv_heads"):
            assert planned.spreads[name].in_blocks(2) is not None, (tp, planned.strategy)


def test_split_group_keeps_every_query_head_and_costs_cache():
    config = LLAMA_70B | {"num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256}
    append, split = plan(config), plan(config, strategy="split-group")
    assert split.padded_sizes["q_heads"] == 24
    assert split.ledger.kv_bytes_per_token == 2 * append.ledger.kv_bytes_per_token
    assert append.strategy == "append"
    assert any("split-group 24/12: caches" in text for text in append.rejected)


@pytest.mark.parametrize(
    ("asked", "axis", "size"),
    [({"intermediate": 128}, "intermediate", 28800), ({"q_heads": 32}, "q_heads", 96)],
)
def test_a_share_may_be_asked_for(asked, axis, size):
    assert plan(LLAMA_70B, local_multiple=asked).padded_sizes[axis] == size


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"strategy": "stretch"}, "strategy must be one of auto, append, .*got 'stretch'"),
        ({"local_multiple": {"depth": 2}}, "depth: the model's axes are intermediate, kv_heads"),
        ({"kv_bytes": 7}, "64/8 heads to 3 ranks with 7 bytes"),
        ({"strategy": "split-group", "tp": 5}, "split-group cannot pad 64/8 heads to 5 ranks"),
    ],
)
def test_what_nothing_serves_is_refused(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        plan(LLAMA_70B, **options)


ALIBI = [{"alibi": True}, {"position_embedding_type": "alibi"}, {"attn_config": {"alibi": True}}]


@pytest.mark.parametrize("said", ALIBI, ids=["flag", "type", "folder"])
def test_slopes_by_head_bar_every_other_number_of_query_heads(said):
    """From 28 to 33 heads each slope would change; a size that keeps them is planned."""
    (key,) = said
    with pytest.raises(ValueError, match=f"^{key}.*: a head's slope .* which 3 ranks would change"):
        plan(LLAMA_70B | said, tp=3)
    assert plan(LLAMA_70B | said, tp=4).inert
    heads = {"num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256}
    kept = plan(LLAMA_70B | said | heads, tp=3)
    assert (kept.padded_sizes["q_heads"], kept.padded_sizes["kv_heads"]) == (24, 12)


def test_a_denied_alibi_is_none():
    said = {"alibi": False, "position_embedding_type": "rope", "attn_config": None}
    assert plan(LLAMA_70B | said).padded_sizes == plan(LLAMA_70B).padded_sizes


OLMO2 = LLAMA_70B | {"model_type": "olmo2", "rms_norm_eps": 1e-6}


def test_norms_over_a_padded_width_leave_their_eps_in_the_config():
    """The config's own eps also serves the norms over the hidden size, which are not padded."""
    planned = plan(OLMO2)
    factors = eps_factors(planned.model, planned.spreads)
    at = "model.layers.*.self_attn."
    assert factors == {at + "q_norm": pytest.approx(64 / 72), at + "k_norm": pytest.approx(8 / 9)}
    padded = planned.padded_config(OLMO2)
    assert padded["tp3"]["norm_eps_factors"] == factors
    assert padded["rms_norm_eps"] == 1e-6
    assert "norm_eps_factors" not in plan(LLAMA_70B).padded_config(LLAMA_70B)["tp3"]


def test_planning_imports_neither_torch_nor_triton():
    code = f"""
import sys
from tp3.pad import plan, read_config
plan({LLAMA_70B!r}).padded_config({LLAMA_70B!r})
import tp3.pad.catalogue
sys.exit(bool({{"torch", "triton", "numpy"}} & set(sys.modules)))
"""
    subprocess.run([sys.executable, "-c", code], check=True)
