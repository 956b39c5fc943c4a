"""Families with grouped-query attention: every tensor has one rule, every config is understood."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.pad.gqa import REAL, TINY, Shapes, complaints, llama, saved, stock_axes
from tp3.pad.catalogue import Catalogue
from tp3.pad.families import READERS, read_model
from tp3.pad.planner import plan


@pytest.mark.parametrize("name", sorted(TINY))
def test_every_tensor_has_one_rule(name: str, tmp_path: Path) -> None:
    config, tensors = saved(TINY[name], tmp_path)
    assert not complaints(read_model(config), tensors)
    catalogue = Catalogue(plan(config, tp=3))
    for tensor, shape in tensors.items():
        entry = catalogue.entry(tensor, shape, "F32")
        assert entry.inert == (entry.padded == shape == entry.stock) or entry.correction
    assert not catalogue.missing(tensors)


def test_single_experts_stand_in_for_fused_ones(tmp_path: Path) -> None:
    config, tensors = saved(TINY["qwen3_5_moe"], tmp_path)
    layer = "model.language_model.layers.1.mlp.experts."
    del tensors[layer + "2.up_proj.weight"]
    assert Catalogue(plan(config, tp=3)).missing(tensors) == [layer + "gate_up_proj"]


def test_what_differs_is_seen(tmp_path: Path) -> None:
    config, tensors = saved(TINY["qwen3_moe"], tmp_path)
    model = read_model(config)
    renamed = "model.layers.1.self_attn.q_proj.weight"
    wrong = dict(tensors) | {"model.norm.weight": (7,)}
    wrong["model.layers.1.self_attn.qq_proj.weight"] = wrong.pop(renamed)
    assert [line.split()[0].rstrip(":") for line in complaints(model, wrong)] == [
        "model.norm.weight",
        "model.layers.1.self_attn.qq_proj.weight",
        renamed,
    ]


@pytest.mark.parametrize("tp", range(2, 9))
@pytest.mark.parametrize("name", [*sorted(TINY), *sorted(REAL)])
def test_a_padded_config_says_what_was_planned(name: str, tp: int) -> None:
    config = TINY.get(name) or REAL[name]
    planned = plan(config, tp=tp)
    again = stock_axes(read_model(planned.padded_config(config)))
    # geometries that padding has made alike are read as one
    said = {axis: again.get(axis, again.get(axis.split(".")[0])) for axis in planned.padded_sizes}
    assert {axis: spread.padded for axis, spread in said.items()} == planned.padded_sizes


@pytest.mark.parametrize("name", sorted(REAL))
def test_heads_keep_their_size(name: str) -> None:
    config = REAL[name]
    sizes, again = read_model(config).sizes, read_model(plan(config, tp=3).padded_config(config))
    assert again.sizes["head_dim"] == sizes["head_dim"]
    assert again.sizes_by_tag == read_model(config).sizes_by_tag


@pytest.mark.parametrize(
    ("name", "tensors"),
    [
        (
            "Qwen3.5-27B",
            {
                "mtp.fc.weight": (5120, 10240),
                "mtp.pre_fc_norm_hidden.weight": (5120,),
                "mtp.layers.0.self_attn.q_proj.weight": (12288, 5120),
                "mtp.layers.0.mlp.down_proj.weight": (5120, 17408),
            },
        ),
        (
            "Qwen3.5-35B-A3B",
            {
                "model.language_model.layers.0.mlp.experts.gate_up_proj": (256, 1024, 2048),
                "mtp.layers.0.mlp.experts.gate_up_proj": (256, 1024, 2048),
                "mtp.layers.0.mlp.experts.255.down_proj.weight": (2048, 512),
                "mtp.layers.0.mlp.shared_expert_gate.weight": (1, 2048),
            },
        ),
        (
            "MiMo-7B",
            {
                "model.mtp_layers.0.input_proj.weight": (4096, 8192),
                "model.mtp_layers.0.self_attn.k_proj.bias": (1024,),
            },
        ),
        (
            "Qwen3-VL-235B",
            {
                "model.language_model.layers.9.mlp.experts.gate_up_proj": (128, 4096, 3072),
                "model.language_model.layers.9.mlp.experts.down_proj": (128, 1536, 4096),
            },
        ),
    ],
)
def test_names_that_transformers_does_not_save(name: str, tensors: Shapes) -> None:
    told = complaints(read_model(REAL[name]), tensors)
    assert not [line for line in told if not line.endswith("missing")]


def test_a_vision_tower_is_named_in_a_note() -> None:
    (note,) = plan(REAL["Qwen3.5-27B"], tp=3).notes
    assert "16 heads" in note
    assert "data-parallel" in note


def test_an_unknown_type_with_llamas_keys() -> None:
    config = llama(9, 3, 64, 1536, 49152, model_type="smaug")
    planned = plan(config, tp=4)
    assert planned.padded_sizes["q_heads"] == 12
    assert planned.notes == ("model_type 'smaug' is not known: planned as a Llama",)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"num_local_experts": 8}, "has num_local_experts, which Llama has not"),
        ({"kv_lora_rank": 512}, "has kv_lora_rank, which Llama has not"),
        ({"vocab_size": None}, "lacks vocab_size"),
        ({"model_type": None}, "model_type must be a string, got None"),
    ],
)
def test_what_is_not_understood_is_named(change: dict[str, Any], told: str) -> None:
    config = llama(9, 3, 64, 1536, 49152, model_type="smaug") | change
    with pytest.raises(ValueError, match=told):
        read_model(config)


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        ("qwen3_next", {"linear_num_value_heads": 5}, "multiple of linear_num_key_heads"),
        ("qwen3_next", {"layer_types": ["full_attention"]}, "layer_types must name 4 layers"),
        ("mimo_v2_flash", {"attention_projection_layout": "fused_qkv"}, "must be split"),
        ("mimo_v2_flash", {"hybrid_layer_pattern": [1]}, "something of 3 layers, got 1"),
        ("llama", {"num_key_value_heads": 4}, "must be a multiple of num_key_value_heads"),
        ("mixtral", {"num_local_experts": None}, "num_local_experts is missing"),
    ],
)
def test_a_malformed_config(name: str, change: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        read_model(TINY[name] | change)


@pytest.mark.parametrize("name", sorted(TINY))
def test_a_malformed_value_is_one_sentence(name: str) -> None:
    """Whatever stands in place of a value is planned around or refused, never a crash."""
    inner, told = TINY[name].get("text_config", TINY[name]), []
    for key in inner:
        for value in ("x", -1, [], {}, [None]):
            changed = inner | {key: value}
            config = TINY[name] | {"text_config": changed} if inner is not TINY[name] else changed
            try:
                plan(config, tp=3)
            except ValueError as error:
                told.append(str(error))
    assert told
    assert not [text for text in told if "\n" in text]


def test_every_reader_is_there() -> None:
    from importlib import import_module

    for place in READERS.values():
        module, function = place.split(":")
        assert callable(getattr(import_module(f"tp3.pad.families.{module}"), function))
