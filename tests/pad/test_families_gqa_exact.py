"""A padded tiny model of every family computes in Transformers what the stock one does.

Both run in fp64, every parameter random: what is left is the rounding of the norms that
Transformers computes in fp32, four digits below the bound. What a wrong map or a missing correction
does is shown beside.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file  # noqa: E402

from tp3.pad.corrections import eps_factors  # noqa: E402
from tp3.pad.planner import Plan, plan  # noqa: E402
from tp3.pad.weights import padded_weights  # noqa: E402

TINY: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "data" / "gqa_tiny.json").read_text()
)
BOUND = 1e-5
# Transformers cannot run Llama 4 without an image, and sizes OLMoE's norms by the hidden size
NOT_RUN = ("llama4", "olmoe")
RUN = sorted(set(TINY) - set(NOT_RUN))
WAYS = [(name, tp, way) for name in RUN for tp, way in ((3, "auto"), (4, "in-group"))]
# Transformers gives sliding layers twice the KV heads, whatever the config says
WAYS.remove(("mimo_v2_flash", 4, "in-group"))

Weights = dict[str, Any]


def stock_model(config: dict[str, Any], folder: Path) -> tuple[Any, dict[str, Any], Weights]:
    """A random model saved: its class, its config and its tensors."""
    if config["model_type"] not in transformers.CONFIG_MAPPING:
        pytest.skip(f"this Transformers has no {config['model_type']}")
    kind = transformers.AutoModelForCausalLM
    if "vision_config" in config:
        kind = transformers.AutoModelForImageTextToText
    torch.manual_seed(0)
    model = kind.from_config(transformers.AutoConfig.for_model(**config), dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            if parameter.ndim == 1:
                parameter.copy_(parameter.mean() + 0.3 * noise)
            else:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    weights: Weights = {}
    for file in folder.glob("*.safetensors"):
        weights |= load_file(file)
    return kind, json.loads((folder / "config.json").read_text()), weights


def logits(kind: Any, folder: Path, factors: Mapping[str, float]) -> Any:
    model, info = kind.from_pretrained(
        folder, dtype=torch.float64, experts_implementation="eager", output_loading_info=True
    )
    assert not any(info.values()), info
    for name, module in model.named_modules():
        factor = factors.get(re.sub(r"(?<=\.layers\.)\d+(?=\.)", "*", name))
        if factor is not None:
            attribute = "variance_epsilon" if hasattr(module, "variance_epsilon") else "eps"
            setattr(module, attribute, getattr(module, attribute) * factor)
    with torch.inference_mode():
        return model.eval()(input_ids=torch.arange(24)[None] * 7 % 96, use_cache=False).logits


def apart(
    name: str,
    folder: Path,
    tp: int,
    way: str,
    change: Callable[[Weights, Plan], None] = lambda weights, planned: None,
) -> float:
    """How far the padded logits are from the stock ones, to the largest of these."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kind, config, weights = stock_model(TINY[name], folder)
        planned = plan(config, tp=tp, strategy=way)
        assert not planned.inert
        padded = {
            name: tensor.contiguous().clone()
            for name, tensor in padded_weights(iter(weights.items()), planned)
        }
        change(padded, planned)
        (folder / "padded").mkdir()
        save_file(padded, folder / "padded" / "model.safetensors", metadata={"format": "pt"})
        text = json.dumps(planned.padded_config(config))
        (folder / "padded" / "config.json").write_text(text)
        stock = logits(kind, folder, {})
        factors = eps_factors(planned.model, planned.spreads)
        ours = logits(kind, folder / "padded", factors)
    vocab = stock.shape[-1]
    assert not ours[..., vocab:].any()
    return float((ours[..., :vocab] - stock).abs().max() / stock.abs().max())


@pytest.mark.parametrize(("name", "tp", "way"), WAYS)
def test_the_padded_model_is_the_stock_one(name: str, tp: int, way: str, tmp_path: Path) -> None:
    assert apart(name, tmp_path, tp, way) < BOUND


def roll(pattern: str, dim: int, heads: int) -> Callable[[Weights, Plan], None]:
    """Each tensor of a name turned by some heads along a dimension."""

    def change(weights: Weights, planned: Plan) -> None:
        head_dim = planned.model.sizes["head_dim"]
        found = [name for name in weights if pattern in name]
        assert found
        for name in found:
            weights[name] = weights[name].roll(heads * head_dim, dim)

    return change


def test_a_wrong_map_is_seen(tmp_path: Path) -> None:
    assert apart("qwen3", tmp_path, 3, "append", roll("k_proj", 0, 1)) > 100 * BOUND


def test_a_wrong_column_is_seen(tmp_path: Path) -> None:
    assert apart("qwen3", tmp_path, 4, "in-group", roll("o_proj", 1, 1)) > 100 * BOUND


def test_a_wrong_conv_channel_is_seen(tmp_path: Path) -> None:
    assert apart("qwen3_next", tmp_path, 3, "append", roll("conv1d", 0, 1)) > 100 * BOUND


def test_a_norm_without_its_correction_is_seen(tmp_path: Path) -> None:
    def uncorrected(weights: Weights, planned: Plan) -> None:
        spread = planned.spreads["q_heads"]
        for name in weights:
            if "q_norm" in name:
                weights[name] *= (spread.padded / spread.stock) ** 0.5

    assert apart("minimax_m2", tmp_path, 3, "append", uncorrected) > 100 * BOUND
