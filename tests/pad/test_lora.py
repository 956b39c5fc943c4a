"""Adapters: padded weight plus padded factors is the padded sum, to the bit, in every way."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.pad.gqa import TINY, expected, llama
from tp3.pad.catalogue import Catalogue
from tp3.pad.lora import padded_adapter
from tp3.pad.planner import Plan, plan
from tp3.pad.weights import pad_tensor

GQA = llama(16, 2, 4, 40, 96) | {"hidden_size": 24, "num_hidden_layers": 1}
CONFIGS = {
    "llama": GQA,
    "fused": GQA | {"model_type": "phi3"},
    "gated-and-delta": TINY["qwen3_5_text"],
    "experts": TINY["qwen3_moe"],
}
# ranks that each way serves: 16/2 heads, and 6/2 of the tiny ones
WAYS = {"append": 6, "in-group": 6, "split-group": 4}
TINY_WAYS = {"append": 5, "in-group": 4, "split-group": 3}
RANK = 3
MODULE = "model.layers.0.self_attn.q_proj"
PEFT = "base_model.model."
# factor: the dimension of the weight that each of its own is
LINEAR, EMBEDDING = ("lora_A.weight", "lora_B.weight"), ("lora_embedding_A", "lora_embedding_B")


def small(*shape: int, seed: int) -> torch.Tensor:
    """Integers, so that sums are exact."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=generator).float()


def adapted(config: dict[str, Any], planned: Plan) -> dict[str, tuple[int, ...]]:
    """The weights that an adapter may name."""
    shapes = {name: rules[0][2] for name, rules in expected(planned.model).items()}
    projections = {
        name: shape
        for name, shape in shapes.items()
        if name.endswith("proj.weight") and len(shape) == 2
    }
    return {"model.embed_tokens.weight": shapes["model.embed_tokens.weight"], **projections}


def factors(name: str, shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    module = PEFT + name.removesuffix(".weight")
    n, k = shape[::-1] if "embed" in name else shape
    first, second = EMBEDDING if "embed" in name else LINEAR
    return {
        f"{module}.{first}": small(RANK, k, seed=1),
        f"{module}.{second}": small(n, RANK, seed=2),
    }


def product(name: str, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """What the factors add to the weight."""
    a, b = tensors.values()
    return (b @ a).T if "embed" in name else b @ a


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_padded_sum_is_the_sum_of_the_padded(config: dict[str, Any], way: str) -> None:
    tp = (TINY_WAYS if config in TINY.values() else WAYS)[way]
    planned = plan(config, tp=tp, strategy=way)
    catalogue = Catalogue(planned)
    names = adapted(config, planned)
    assert len(names) > 4
    for name, shape in names.items():
        tensors = factors(name, shape)
        added = product(name, dict(padded_adapter(tensors.items(), planned)))
        weight, entry = small(*shape, seed=3), catalogue.entry(name, shape, "F32")
        whole = pad_tensor(entry, weight + product(name, tensors))
        assert torch.equal(pad_tensor(entry, weight) + added, whole), name


def test_half_of_a_fused_factor_is_the_up_projection() -> None:
    """Engines that split a fused B by halving its rows: gate and up have grown alike."""
    planned = plan(CONFIGS["fused"], tp=6)
    tensors = factors("model.layers.0.mlp.gate_up_proj.weight", (80, 24))
    _, wide = dict(padded_adapter(tensors.items(), planned)).values()
    *_, stock = tensors.values()
    gate, up = wide.chunk(2)
    assert torch.equal(gate[:40], stock[:40])
    assert torch.equal(up[:40], stock[40:])
    assert not gate[40:].any()
    assert not up[40:].any()


def test_control_appended_rows_are_noticed() -> None:
    """Query heads dealt out, the factor's rows at the end."""
    planned = plan(GQA, tp=6, strategy="in-group")
    tensors = factors(MODULE + ".weight", (64, 24))
    a, b = dict(padded_adapter(tensors.items(), planned)).values()
    wrong = torch.zeros_like(b)
    wrong[:64] = tensors[f"{PEFT}{MODULE}.lora_B.weight"]
    assert not torch.equal(b @ a, wrong @ a)


def test_names_in_memory_and_whole_tensors() -> None:
    planned = plan(GQA, tp=6)
    tensors = {
        f"{PEFT}{MODULE}.lora_A.default.weight": small(RANK, 24, seed=1),
        f"{PEFT}{MODULE}.lora_B.default.weight": small(64, RANK, seed=2),
        PEFT + "lm_head.weight": small(96, 24, seed=3),
    }
    made = dict(padded_adapter(tensors.items(), planned))
    sizes = planned.padded_sizes
    assert [tuple(t.shape) for t in made.values()] == [
        (RANK, 24), (sizes["q_heads"] * 4, RANK), (sizes["vocab"], 24)
    ]  # fmt: skip
    name = f"{PEFT}{MODULE}.lora_A.default.weight"
    assert made[name] is tensors[name]


@pytest.mark.parametrize(
    ("name", "shape", "told"),
    [
        (f"{MODULE}.lora_A.weight", (RANK, 25), r"has shape \[3, 25\], expected \[r, 24\]"),
        (f"{MODULE}.lora_B.weight", (RANK, 64), r"has shape \[3, 64\], expected \[64, r\]"),
        (f"{MODULE}.lora_B.weight", (64,), r"has shape \[64\], expected \[64, r\]"),
        (f"{MODULE}x.lora_A.weight", (RANK, 24), "q_projx.weight is not part of a llama model"),
        (f"{MODULE}.lora_magnitude_vector", (64,), "DoRA divides each row by its length"),
        (f"{MODULE}.lora_A.weight", (RANK, 24), "q_proj.lora_B.weight is missing, the partner"),
    ],
)
def test_what_does_not_fit_is_named(name: str, shape: tuple[int, ...], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        list(padded_adapter([(PEFT + name, torch.zeros(shape))], plan(GQA, tp=6)))
