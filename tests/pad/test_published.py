"""The geometries that others published and serve: each from a config alone, constraints named."""

from __future__ import annotations

from typing import Any

import pytest

from tests.pad.brute import CONFIGS
from tests.pad.gqa import llama
from tp3.pad.corrections import eps_factors
from tp3.pad.planner import plan

QWEN_27B = CONFIGS["Qwen3.5-27B"]
MXFP4 = QWEN_27B | {"quantization_config": {"quant_method": "mxfp4"}}
NVFP4 = QWEN_27B | {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
DRAFTER = llama(
    32, 8, 128, 17408, 248320, model_type="qwen3", num_hidden_layers=8, quantization_config=BLOCKS
)
GLM_FLASH = CONFIGS["GLM-5.3-Flash"]
V4_FLASH = CONFIGS["DeepSeek-V4-Flash"]
V4_1_FLASH = V4_FLASH | {"moe_intermediate_size": 2304, "n_routed_experts": 384}
LINEAR = {"linear_key_heads": 18, "linear_value_heads": 54}
EXPERTS = {"moe_intermediate": 2304, "shared_intermediate": 2304}
# the Qwen3.5-27B on three ranks: two KV heads of 256, keys and values of two bytes
TARGET_BYTES = 2 * 2 * 256 * 2
GLM_SIZES = {"q_heads": 66, "kda_heads": 66, **EXPERTS, "vocab": 154944}

GEOMETRIES: dict[str, tuple[dict[str, Any], int, dict[str, Any], dict[str, int]]] = {
    "qwen-27b-heads": (QWEN_27B, 3, {}, {"q_heads": 36, "kv_heads": 6, **LINEAR}),
    "qwen-27b-vocab": (QWEN_27B, 3, {}, {"vocab": 248448}),
    "qwen-27b-split": (QWEN_27B, 3, {"strategy": "split-group"}, {"q_heads": 24, "kv_heads": 12}),
    "qwen-27b-mxfp4-k64": (
        MXFP4,
        3,
        {"local_multiple": {"intermediate": 64}},
        {"intermediate": 17472, "q_heads": 36, "kv_heads": 6, **LINEAR},
    ),
    "qwen-27b-mxfp4-k128": (
        MXFP4,
        3,
        {"local_multiple": {"intermediate": 128}},
        {"intermediate": 17664, "q_heads": 36, "kv_heads": 6, **LINEAR},
    ),
    "qwen-27b-nvfp4": (NVFP4, 3, {}, {"intermediate": 17424, "q_heads": 36, "kv_heads": 6}),
    "drafter": (DRAFTER, 3, {}, {"q_heads": 36, "kv_heads": 9, "intermediate": 17664}),
    "drafter-like-its-target": (
        DRAFTER,
        3,
        {"kv_bytes_per_layer": TARGET_BYTES},
        {"q_heads": 48, "kv_heads": 12, "intermediate": 17664},
    ),
    "drafter-tp6": (DRAFTER, 6, {}, {"q_heads": 48, "kv_heads": 12}),
    "glm-5.3-flash": (GLM_FLASH, 3, {"local_multiple": {"moe_intermediate": 128}}, GLM_SIZES),
    "glm-5.3-flash-tp6": (GLM_FLASH, 6, {"local_multiple": {"moe_intermediate": 128}}, GLM_SIZES),
    "deepseek-v4-flash": (V4_FLASH, 3, {}, {"q_heads": 72, "o_groups": 9}),
    "deepseek-v4.1-flash": (
        V4_1_FLASH,
        3,
        {"local_multiple": {"q_heads": 32}},
        {"q_heads": 96, "o_groups": 12, "moe_intermediate": 2304, "vocab": 129408},
    ),
    "kimi-k2-fp8": (CONFIGS["Kimi-K2-Instruct"], 6, {}, {"q_heads": 72}),
    "llama-70b": (
        CONFIGS["Meta-Llama-3.1-70B"],
        3,
        {},
        {"q_heads": 72, "kv_heads": 9, "intermediate": 28704, "vocab": 128256},
    ),
    "minimax-m2": (CONFIGS["MiniMax-M2.5"], 3, {}, {"q_heads": 54, "kv_heads": 9}),
}


@pytest.mark.parametrize("name", GEOMETRIES)
def test_published_geometry(name: str) -> None:
    config, tp, asked, sizes = GEOMETRIES[name]
    padded = plan(config, tp=tp, **asked).padded_sizes
    assert {axis: padded[axis] for axis in sizes} == sizes


def test_a_target_says_what_its_drafter_must_cache() -> None:
    assert set(plan(QWEN_27B, tp=3).kv_bytes_per_layer.values()) == {TARGET_BYTES}


def test_one_padding_of_glm_5_3_flash_serves_three_and_six() -> None:
    asked = {"moe_intermediate": 128}
    both = plan(GLM_FLASH, tp=3, also_tp=(6,), local_multiple=asked)
    assert both.padded_sizes == plan(GLM_FLASH, tp=3, local_multiple=asked).padded_sizes


def test_minimax_m2_corrects_its_norms() -> None:
    planned = plan(CONFIGS["MiniMax-M2.5"], tp=3)
    factors = eps_factors(planned.model, planned.spreads)
    assert {name.rpartition(".")[2]: factor for name, factor in factors.items()} == {
        "q_norm": pytest.approx(48 / 54),
        "k_norm": pytest.approx(8 / 9),
    }
