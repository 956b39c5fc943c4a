"""What vLLM's kernels ask of a plan beside the format, and what tp3's lift."""

from types import SimpleNamespace

import pytest

from tests.vllm.models import CONFIGS
from tp3.pad import plan
from tp3.vllm.plans import ALIGNMENT, engine_plan, planned_for

GPT_OSS = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 2,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "vocab_size": 201088,
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
    },
}
CHANNELS = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"},
        }
    },
    "ignore": ["lm_head"],
}
LIFTED = tuple(ALIGNMENT)


@pytest.mark.parametrize(
    ("tp", "unlifted", "lifted"),
    [(3, 3072, 2880), (5, 3200, 2880), (6, 3072, 2880), (7, 3584, 2912)],
)
def test_mxfp4_then_asks_for_whole_blocks_alone(tp, unlifted, lifted):
    assert engine_plan(GPT_OSS, tp).padded_sizes["moe_intermediate"] == unlifted
    freed = engine_plan(GPT_OSS, tp, LIFTED).padded_sizes["moe_intermediate"]
    assert freed == lifted == plan(GPT_OSS, tp=tp).padded_sizes["moe_intermediate"]


def test_fp8_by_channel_then_takes_any_number_of_rows():
    """Three KV heads of 24 on a rank are 72 rows; what is a product's K stays in sixteens."""
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 24}
    config = CONFIGS["llama"] | heads | {"quantization_config": CHANNELS}
    sizes = [engine_plan(config, 3, lifted).padded_sizes for lifted in ((), LIFTED)]
    assert [(each["q_heads"], each["kv_heads"]) for each in sizes] == [(24, 12), (18, 9)]
    assert all(each["intermediate"] == 192 for each in sizes)


@pytest.mark.parametrize("lifted", [(), LIFTED], ids=["", "lifted"])
def test_workers_plan_with_what_was_lifted(lifted):
    mark = {"tp": 6, "config": GPT_OSS, "lifted": list(lifted)}
    held = SimpleNamespace(hf_config=SimpleNamespace(tp3=mark))
    assert planned_for(held) == engine_plan(GPT_OSS, 6, lifted)


def test_alignment_of_no_format_is_refused():
    with pytest.raises(ValueError, match="alignment of int2: the formats are plain, fp8, int8"):
        plan(GPT_OSS, tp=3, alignment={"int2": (1, 1)})
