"""A padded model against the stock one in Transformers, in fp32 on the CPU, and its zeros counted.

The bound is measured, not chosen: against the stock model in fp64, the padded model's logits may
err at most twice as far as those of the stock model in fp32, in the same run.
"""

from __future__ import annotations

import copy
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tp3.pad.audit import audit
from tp3.pad.checkpoint import read_weights
from tp3.pad.corrections import eps_factors
from tp3.pad.dequantise import dequantised
from tp3.pad.families import read_model
from tp3.pad.formats import PLAIN, Format, read_format
from tp3.pad.headers import INDEX, SINGLE
from tp3.pad.planner import Plan, plan
from tp3.pad.weights import padded_weights, spelled

NUM_TOKENS = 24
WIDENED = ("F64", "F32", "F16", "BF16")  # 8-bit floats are codes under a scale
RANDOM_LAYERS = 2  # where only a config is given
_LAYER = re.compile(r"(?<=\.layers\.)\d+(?=\.)")


@dataclass(frozen=True)
class Verified:
    """Largest differences of logits, over all positions and trained tokens.

    apart: padded from stock, both fp32. error, rounding: padded and stock from stock in fp64.
    zeros: padded entries that were looked at. wrong: tensors whose padded form is not what the plan
    says. tail: the largest logit of a token that only the padded model has.
    """

    layers: int
    apart: float
    error: float
    rounding: float
    zeros: int
    wrong: tuple[str, ...]
    tail: float

    @property
    def bound(self) -> float:
        return 2 * self.rounding

    @property
    def ok(self) -> bool:
        return self.error <= self.bound and not self.wrong and self.tail == 0


def verify(
    path: str | PathLike[str],
    config: Mapping[str, Any],
    *,
    tp: int,
    layers: int | None = None,
    strategy: str = "auto",
    seed: int = 0,
) -> Verified:
    """Compares both models on fixed tokens; ``path`` is a folder, or a config for random weights.

    layers: only the first so many (with random weights two unless given). Quantised weights are
    padded as they are stored and compared as the numbers they mean. Errors: ValueError for what
    cannot be compared, such as packed integers.
    """
    if find_spec("transformers") is None:
        raise ValueError("verify needs Transformers: pip install 'tp3[transformers]'")
    if "tp3" in config:
        raise ValueError(f"{path} is padded already; verify the checkpoint that it was made from")
    root = Path(path)
    has_weights = (root / SINGLE).exists() or (root / INDEX).exists()
    if _is_quantised(read_format(config)) and not has_weights:
        raise ValueError(f"verify makes plain weights, but those of {path} are quantised")
    if not has_weights and layers is None:
        layers = RANDOM_LAYERS
    short = _shortened(config, layers)
    planned = plan(short, tp=tp, strategy=strategy)
    with tempfile.TemporaryDirectory() as scratch:
        if not has_weights:
            _save_random(short, Path(scratch), seed)
            root = Path(scratch)
        weights = {
            name: tensor.float() if spelled(tensor.dtype) in WIDENED else tensor
            for name, tensor in _first_layers(read_weights(root), len(planned.model.layers))
        }
    return _compare(short, planned, weights)


def _compare(config: Mapping[str, Any], planned: Plan, weights: dict[str, Tensor]) -> Verified:
    padded = dict(padded_weights(weights.items(), planned))
    if _is_quantised(form := planned.format):
        weights, padded = dequantised(weights, form), dequantised(padded, form)
        config = _without_quantisation(config)
        planned = replace(planned, model=read_model(config), format=PLAIN)
    zeros, wrong = audit(planned, weights, padded)
    vocab = _vocabulary(config)
    tokens = torch.arange(NUM_TOKENS)[None] * 7919 % vocab
    model = _model(config, padded, planned.padded_config(config))
    _correct(model, eps_factors(planned.model, planned.spreads))
    ours = _logits(model, tokens)
    del padded, model
    stock = _model(config, weights)
    single = _logits(stock, tokens)
    exact = _logits(stock.double(), tokens)
    real, tail = ours[..., :vocab], ours[..., vocab:]
    return Verified(
        layers=len(planned.model.layers),
        apart=_distance(real, single),
        error=_distance(real, exact),
        rounding=_distance(single, exact),
        zeros=zeros,
        wrong=wrong,
        tail=float(tail.abs().max()) if tail.numel() else 0.0,
    )


def _first_layers(
    weights: Iterator[tuple[str, Tensor]], layers: int
) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in weights:
        layer = _LAYER.search(name)
        if layer is None or int(layer.group()) < layers:
            yield name, tensor


def _shortened(config: Mapping[str, Any], layers: int | None) -> dict[str, Any]:
    """A config of fewer layers; lists with a value per layer are cut alike."""
    short = copy.deepcopy(dict(config))
    if layers is None:
        return short
    inner = short["text_config"] if isinstance(short.get("text_config"), dict) else short
    have = inner.get("num_hidden_layers")
    if not isinstance(have, int):
        raise ValueError("num_hidden_layers is missing from the config")
    if not 1 <= layers <= have:
        raise ValueError(f"layers must be in 1..{have}, got {layers}")
    for key, value in inner.items():
        if isinstance(value, list) and len(value) == have and have > 1:
            inner[key] = value[:layers]
    inner["num_hidden_layers"] = layers
    if isinstance(inner.get("max_window_layers"), int):
        inner["max_window_layers"] = min(inner["max_window_layers"], layers)
    return short


def _is_quantised(form: Format) -> bool:
    return form.name != PLAIN.name or bool(form.parts)


def _without_quantisation(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_quantisation(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if key != "quantization_config"
    }


def _vocabulary(config: Mapping[str, Any]) -> int:
    inner = config.get("text_config")
    return int((inner if isinstance(inner, Mapping) else config)["vocab_size"])


def _save_random(config: Mapping[str, Any], folder: Path, seed: int) -> None:
    """Random weights as Transformers would save them; none is left at a value that hides errors."""
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    model = auto.from_config(_auto_config(config), dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(generator=generator).mul_(max(weight.shape[-1], 1) ** -0.5)
            if "norm" in name:
                weight.add_(1)
    model.save_pretrained(folder)


def _model(
    config: Mapping[str, Any], weights: dict[str, Tensor], padded: Mapping[str, Any] | None = None
) -> Any:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    ours = _auto_config(config)
    if padded is not None:
        _override(ours, config, padded)
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(ours), None)
    if kind is None:
        raise ValueError(f"verify compares causal language models, which {ours.model_type} is not")
    model, info = kind.from_pretrained(
        None,
        config=ours,
        state_dict=dict(weights),
        dtype=torch.float32,
        experts_implementation="eager",  # grouped products do not take fp64 or odd strides
        output_loading_info=True,
    )
    lost = sorted(info["missing_keys"])
    if lost:
        raise ValueError(f"Transformers finds no weight for {lost[0]}")
    return model.eval()


def _override(ours: Any, config: Mapping[str, Any], padded: Mapping[str, Any]) -> None:
    """Sets what padding changes, as engines do: not every config class reads every padded size."""
    for key, value in padded.items():
        if key == "tp3" or config.get(key) == value:
            continue
        if isinstance(value, Mapping) and not isinstance(getattr(ours, key, {}), dict):
            _override(getattr(ours, key), config.get(key) or {}, value)
        else:
            setattr(ours, key, value)


def _auto_config(config: Mapping[str, Any]) -> Any:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING, AutoConfig

    if config["model_type"] not in CONFIG_MAPPING:
        raise ValueError(f"Transformers does not know the model_type {config['model_type']!r}")
    values = {key: value for key, value in config.items() if key not in ("model_type", "tp3")}
    try:
        return AutoConfig.for_model(config["model_type"], **copy.deepcopy(values))
    except StrictDataclassError as error:
        raise ValueError(f"Transformers refuses the config: {error.__cause__ or error}") from error


def _correct(model: Any, factors: Mapping[str, float]) -> None:
    """What a host does: the eps of widened norms."""
    for name, module in model.named_modules():
        factor = factors.get(_LAYER.sub("*", name))
        if factor is not None:
            module.variance_epsilon *= factor


@torch.inference_mode()
def _logits(model: Any, tokens: Tensor) -> Tensor:
    logits: Tensor = model(tokens, use_cache=False).logits
    return logits


def _distance(left: Tensor, right: Tensor) -> float:
    return float((left.double() - right.double()).abs().max())
