"""Published geometries of grouped-query families, from their configs alone."""

from __future__ import annotations

import pytest

from tests.pad.gqa import HEADS, REAL, TINY, expected, llama, padded
from tp3.pad.families import read_model
from tp3.pad.planner import plan


def test_qwen3_5_27b() -> None:
    config = REAL["Qwen3.5-27B"]
    axes = (*HEADS, "linear_key_heads", "linear_value_heads", "intermediate", "vocab")
    assert plan(config, tp=3).strategy == "append"
    assert padded(config, 3, *axes) == [36, 6, 18, 54, 17424, 248448]
    for tile, width in ((64, 17472), (128, 17664)):
        asked = {"intermediate": tile}
        assert padded(config, 3, "intermediate", local_multiple=asked) == [width]


def test_qwen3_5_27b_split_group() -> None:
    assert padded(REAL["Qwen3.5-27B"], 3, *HEADS, strategy="split-group") == [24, 12]


@pytest.mark.parametrize(
    ("tp", "sizes"),
    [(3, [72, 9, 28704, 128256]), (5, [80, 10]), (6, [96, 12]), (7, [112, 14])],
)
def test_llama_3_1_70b(tp: int, sizes: list[int]) -> None:
    axes = (*HEADS, "intermediate", "vocab")[: len(sizes)]
    assert padded(REAL["Llama-3.1-70B"], tp, *axes) == sizes


def test_minimax_m2() -> None:
    assert padded(REAL["MiniMax-M2.5"], 3, *HEADS) == [54, 9]
    rules = [rule for rule in read_model(REAL["MiniMax-M2.5"]).rules if rule.correction]
    assert [rule.pattern.split(".")[-2] for rule in rules] == ["q_norm", "k_norm"]
    assert {rule.correction for rule in rules} == {"rms_width"}


def test_mixtral_8x22b() -> None:
    assert padded(REAL["Mixtral-8x22B"], 3, *HEADS, "vocab") == [54, 9, 32064]


@pytest.mark.parametrize("tp", range(2, 9))
def test_a_size_without_a_key_keeps_its_multiple(tp: int) -> None:
    """MiMo-V2 without ``swa_num_key_value_heads``: sliding layers have twice the KV heads."""
    full, sliding = padded(TINY["mimo_v2_flash"], tp, "kv_heads", "kv_heads.sliding")
    assert sliding == 2 * full


def test_geometries_may_differ_in_their_way() -> None:
    """Gemma 4 on five ranks: whole groups in sliding layers, copies in full ones, one q count."""
    config = REAL["Gemma-4-26B-A4B"]
    assert padded(config, 5, *HEADS, "q_heads.full", "kv_heads.full") == [20, 10, 20, 5]
    assert plan(config, tp=5).strategy == "append and in-group"


def test_few_kv_heads_are_copied() -> None:
    config = REAL["Qwen3.5-35B-A3B"]
    planned = plan(config, tp=6)
    assert planned.strategy == "in-group"
    assert [planned.padded_sizes[axis] for axis in HEADS] == [18, 6]
    assert padded(config, 5, *HEADS) == [20, 5]
    assert padded(config, 7, *HEADS) == [21, 7]


def test_a_drafter_and_its_target() -> None:
    target = plan(REAL["Qwen3.5-27B"], tp=3)
    (cached,) = set(target.kv_bytes_per_layer.values())
    quantised = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    drafter = llama(32, 8, 128, 17408, 248320, model_type="qwen3", quantization_config=quantised)
    assert padded(drafter, 3, *HEADS, "intermediate") == [36, 9, 17664]
    assert padded(drafter, 3, *HEADS, kv_bytes_per_layer=cached) == [48, 12]


def test_gemma_4_has_one_count_of_query_heads() -> None:
    for tp in range(2, 9):
        sizes = plan(REAL["Gemma-4-26B-A4B"], tp=tp).padded_sizes
        assert sizes["q_heads"] == sizes["q_heads.full"]
    assert padded(REAL["Gemma-4-26B-A4B"], 3, *HEADS, "kv_heads.full") == [24, 12, 3]


def test_gpt_oss() -> None:
    config = REAL["gpt-oss-20b"]
    assert padded(config, 7, *HEADS, "moe_intermediate") == [112, 14, 2912]
    rules = {rule.pattern.split("*.")[-1]: rule for rule in read_model(config).rules}
    assert rules["self_attn.sinks"].fill == 0.0
    gate_up = rules["mlp.experts.gate_up_proj"]
    assert gate_up.dims == ("experts", "2*moe_intermediate", "hidden")
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    rules = {rule.pattern.split("*.")[-1]: rule for rule in read_model(plain).rules}
    assert rules["mlp.experts.gate_up_proj"].dims == ("experts", "hidden", "2*moe_intermediate")


def test_fp8_experts_are_whole_blocks() -> None:
    assert padded(REAL["MiniMax-M2.5"], 8, "moe_intermediate") == [2048]
    assert padded(REAL["Qwen3-30B-A3B-FP8"], 4, "moe_intermediate") == [1024]


def test_step_has_more_query_heads_in_sliding_layers() -> None:
    """The keys of Step's own configs: 64/8 heads, 96/8 in sliding layers."""
    config = {
        "model_type": "step3p5",
        "hidden_size": 4096,
        "intermediate_size": 11264,
        "moe_intermediate_size": 1280,
        "share_expert_dims": 1280,
        "moe_num_experts": 288,
        "moe_layers_enum": "1,2,3",
        "num_hidden_layers": 4,
        "num_attention_heads": 64,
        "num_attention_groups": 8,
        "head_dim": 128,
        "vocab_size": 128896,
        "layer_types": ["full_attention", *["sliding_attention"] * 3, "sliding_attention"],
        "num_nextn_predict_layers": 1,
        "attention_other_setting": {"num_attention_heads": 96, "num_attention_groups": 8},
    }
    heads = (*HEADS, "q_heads.sliding", "kv_heads.sliding")
    assert padded(config, 3, *heads) == [72, 9, 108, 9]
    again = plan(config, tp=3).padded_config(config)
    assert again["num_attention_groups"] == 9
    assert again["attention_other_setting"] == {
        "num_attention_heads": 108,
        "num_attention_groups": 9,
    }
    (gate, *_), (draft, *_) = (
        expected(read_model(config))[f"model.layers.{layer}.self_attn.g_proj.weight"]
        for layer in (0, 4)
    )
    assert (gate[-1], draft[-1]) == ((64, 4096), (96, 4096))


def test_mimo_v2_has_more_kv_heads_in_sliding_layers() -> None:
    """The keys of the Hub's config: 64/4 heads, 64/8 in sliding layers."""
    config = TINY["mimo_v2_flash"] | {
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "swa_num_attention_heads": 64,
        "swa_num_key_value_heads": 8,
        "hybrid_layer_pattern": [0, 1, 1],
        "moe_layer_freq": [0, 1, 1],
    }
    assert padded(config, 3, *HEADS, "q_heads.sliding", "kv_heads.sliding") == [96, 6, 72, 9]
