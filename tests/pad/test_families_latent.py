"""Latent attention, delta attention and Mamba: every tensor that Transformers saves has one rule,
and the published geometries come out of the configs alone.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from tests.pad.latent import TINY, save
from tp3.pad.extent import spread_of
from tp3.pad.families import read_model
from tp3.pad.planner import plan

DATA = Path(__file__).parent / "data"
REAL = json.loads((DATA / "latent_real.json").read_text())
SIZES = range(2, 9)


def tensors(config):
    """From a config: name -> (rule, stock shape), and the patterns that take any name."""
    planned = plan(config, tp=2)
    model = planned.model
    axes = {name: spread.stock for name, spread in planned.spreads.items()}
    found, open_ended = defaultdict(list), []
    for rule in model.rules:
        if rule.pattern.endswith("**"):
            open_ended.append(rule.pattern.removesuffix("**"))
            continue
        for layer in model.places(rule):
            sizes = {**model.sizes_in(layer), **axes}
            shape = tuple(spread_of(dim, sizes, {}).stock for dim in rule.dims)
            name = rule.pattern if layer is None else rule.pattern.replace("*", str(layer))
            for expert in range(model.experts) if "#" in name else (0,):
                found[name.replace("#", str(expert))].append((rule, shape))
    twice = {name: rules for name, rules in found.items() if len(rules) > 1}
    assert not twice
    return {name: rules[0] for name, rules in found.items()}, tuple(open_ended)


def check(config, saved):
    """Every saved tensor has one rule with its shape, and none is missing."""
    rules, open_ended = tensors(config)
    saved = {
        name: shape for name, shape in saved.items() if not name.startswith(open_ended or ("/",))
    }
    assert sorted(set(saved) - set(rules)) == []
    assert {n: s for n, s in saved.items() if s != rules[n][1]} == {}
    assert sorted(n for n, (rule, _) in rules.items() if not rule.spare and n not in saved) == []


@pytest.mark.parametrize("tiny", sorted(TINY))
def test_every_tensor_has_one_rule(tmp_path, tiny):
    pytest.importorskip("transformers")
    shapes = {name: tuple(tensor.shape) for name, tensor in save(TINY[tiny], tmp_path).items()}
    check(TINY[tiny], shapes)
    check(json.loads((tmp_path / "config.json").read_text()), shapes)


HEADS = {
    "DeepSeek-V3": (132, 130, 132, 140),
    "DeepSeek-V3.2": (132, 130, 132, 140),
    "Kimi-K2": (66, 70, 72, 70),
    "GLM-5-FP8": (66, 70, 72, 70),
    "Kimi-Linear": (36, 40, 36, 42),
    "GLM-4.7-Flash": (24, 20, 24, 28),
}


@pytest.mark.parametrize("name", HEADS)
def test_published_heads_under_fp8_blocks(name):
    planned = tuple(plan(REAL[name], tp=tp).padded_sizes["q_heads"] for tp in (3, 5, 6, 7))
    assert planned == HEADS[name]


@pytest.mark.parametrize("tp", [3, 6])
def test_glm_5_3_flash(tp):
    planned = plan(REAL["GLM-5.3-Flash"], tp=tp, local_multiple={"moe_intermediate": 128})
    sizes = planned.padded_sizes
    heads = {3: 66, 6: 66}[tp]
    assert (sizes["q_heads"], sizes["kda_heads"]) == (heads, heads)
    assert (sizes["moe_intermediate"], sizes["shared_intermediate"]) == (2304, 2304)
    assert sizes["vocab"] == 154944
    config = planned.padded_config(REAL["GLM-5.3-Flash"])["text_config"]
    assert (config["num_attention_heads"], config["linear_num_heads"]) == (heads, heads)


@pytest.mark.parametrize("name", ["DeepSeek-V4-Flash", "DeepSeek-V4-Flash-FP8"])
def test_deepseek_v4_pads_whole_groups(name):
    sizes = plan(REAL[name], tp=3).padded_sizes
    assert (sizes["q_heads"], sizes["o_groups"]) == (72, 9)
    asked = plan(REAL[name], tp=3, local_multiple={"q_heads": 32}).padded_sizes
    assert (asked["q_heads"], asked["o_groups"]) == (96, 12)


@pytest.mark.parametrize("tp", SIZES)
@pytest.mark.parametrize("name", sorted(REAL))
def test_every_rank_gets_whole_units(name, tp):
    planned = plan(REAL[name], tp=tp)
    for axis in planned.axes:
        if axis.name != "kv_heads":
            assert axis.padded % tp == 0, axis
    assert planned.ledger.weight_bytes * tp >= planned.ledger.stock_bytes
    assert plan(planned.padded_config(REAL[name]), tp=tp).inert


@pytest.mark.parametrize("name", ["DeepSeek-V3", "Kimi-K2.5", "GLM-5.2"])
def test_the_latent_cache_is_on_every_rank(name):
    config = REAL[name].get("text_config", REAL[name])
    entries = config["num_hidden_layers"] * (config["kv_lora_rank"] + config["qk_rope_head_dim"])
    assert {plan(REAL[name], tp=tp).ledger.kv_bytes_per_token for tp in SIZES} == {2 * entries}


def test_shared_experts_grow_with_the_experts():
    """An engine multiplies one config key: 2 x 1408 columns would be 2816, not the least 2880."""
    config = {**TINY["deepseek_v3-mtp"], "moe_intermediate_size": 1408, "n_shared_experts": 2}
    sizes = plan(config, tp=5).padded_sizes
    assert (sizes["moe_intermediate"], sizes["shared_intermediate"]) == (1440, 2880)


def test_a_single_mamba_group_grows_inside():
    planned = plan(REAL["Granite-4-H-Small"], tp=3)
    assert planned.padded_sizes["mamba_heads"] == 129
    assert "mamba_groups" not in planned.padded_sizes
    corrected = {rule.pattern for rule in planned.model.rules if rule.correction == "rms_width"}
    assert "model.layers.*.mamba.norm.weight" in corrected
    assert any("mamba_expand" in note for note in planned.notes)
    assert planned.padded_config(REAL["Granite-4-H-Small"])["mamba_expand"] == 129 * 64 / 4096
    whole = plan(REAL["Granite-4-H-Small"], tp=3, local_multiple={"mamba_heads": 64})
    padded = whole.padded_config(REAL["Granite-4-H-Small"])
    assert (padded["mamba_n_heads"], padded["mamba_expand"]) == (192, 3)


def test_whole_mamba_groups_need_no_correction():
    planned = plan(REAL["Nemotron-3-Super"], tp=3)
    assert (planned.padded_sizes["mamba_groups"], planned.padded_sizes["mamba_heads"]) == (9, 144)
    rules = planned.model.rules
    assert not [r for r in rules if r.correction and r.pattern.endswith("mixer.norm.weight")]


def test_the_mamba_width_follows_the_heads():
    padded = plan(REAL["Falcon-H1-34B"], tp=3).padded_config(REAL["Falcon-H1-34B"])
    assert (padded["mamba_n_groups"], padded["mamba_n_heads"], padded["mamba_d_ssm"]) == (
        3,
        48,
        6144,
    )
    assert padded["tp3"]["stock"]["mamba_d_ssm"] == 4096


# Shapes that no copy made by Transformers holds: vLLM's deepseek_mtp and nemotron_h_mtp, and the
# index files on the Hub.
DRAFTS = {
    "deepseek_v3-mtp": {
        "model.layers.3.eh_proj.weight": (40, 80),
        "model.layers.3.enorm.weight": (40,),
        "model.layers.3.hnorm.weight": (40,),
        "model.layers.3.embed_tokens.weight": (96, 40),
        "model.layers.3.shared_head.head.weight": (96, 40),
        "model.layers.3.shared_head.norm.weight": (40,),
        "model.layers.3.self_attn.q_b_proj.weight": (48, 20),
        "model.layers.3.mlp.experts.3.up_proj.weight": (28, 40),
    },
    "nemotron_h-latent": {
        "mtp.layers.0.eh_proj.weight": (40, 80),
        "mtp.layers.0.enorm.weight": (40,),
        "mtp.layers.0.mixer.q_proj.weight": (48, 40),
        "mtp.layers.1.mixer.experts.3.down_proj.weight": (20, 28),
        "mtp.layers.1.norm.weight": (40,),
        "mtp.layers.1.final_layernorm.weight": (40,),
    },
}


@pytest.mark.parametrize("name", DRAFTS)
def test_prediction_layers_may_be_there(name):
    rules, _ = tensors(TINY[name])
    found = {tensor: rules[tensor][1] for tensor in DRAFTS[name]}
    assert found == DRAFTS[name]
    assert all(rules[tensor][0].spare for tensor in DRAFTS[name])


def test_deepseek_v4_predicts_with_a_block_of_its_own():
    rules, _ = tensors({**TINY["deepseek_v4"], "num_nextn_predict_layers": 1})
    expected = {
        "mtp.0.e_proj.weight": (40, 40),
        "mtp.0.hc_head_fn": (2, 80),
        "mtp.0.attn.wq_b.weight": (96, 20),
        "mtp.0.attn.attn_sink": (6,),
        "mtp.0.ffn.gate.bias": (4,),
        "mtp.0.ffn.experts.3.w2.weight": (40, 28),
    }
    assert {name: rules[name][1] for name in expected} == expected
    assert not [name for name in rules if name.startswith("mtp.") and "compressor" in name]


def test_puzzle_models_are_refused():
    with pytest.raises(ValueError, match="ffn_mult"):
        plan({"model_type": "nemotron-nas"}, tp=3)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("deepseek_v4", {"o_groups": 4}, "multiple of o_groups, got 6 and 4"),
        ("deepseek_v4", {"compress_ratios": [0, 8, 0, 0, 0]}, "compress_ratios must give"),
        ("nemotron_h", {"hybrid_override_pattern": "MX*-"}, "got 'X'"),
        ("nemotron_h", {"n_groups": 4}, "multiple of its groups, got 6 and 4"),
        ("deepseek_v2", {"kv_lora_rank": None}, "kv_lora_rank is missing"),
        ("kimi_linear", {"linear_attn_config": None}, "linear_num_heads is missing"),
    ],
)
def test_a_config_that_makes_no_sense(name, change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        read_model({**TINY[name], **change})


def test_a_document_of_plans(tmp_path):
    made = spec_from_file_location("make_plans", Path(__file__).parents[2] / "docs/make_plans.py")
    assert made is not None
    module = module_from_spec(made)
    made.loader.exec_module(module)
    for name, config in (("a--one", "DeepSeek-V3"), ("a--two", "DeepSeek-V3")):
        (tmp_path / f"{name}_config.json").write_text(json.dumps(REAL[config]))
    (tmp_path / "three").mkdir()
    (tmp_path / "three/config.json").write_text(json.dumps({"model_type": "nemotron-nas"}))
    text = module.document(tmp_path)
    assert "## a/one, a/two\n" in text
    assert "| 3 | append | q_heads **132** |" in text
    assert "## three\n\nRefused: model_type 'nemotron-nas'" in text
