"""Tiny random models of every family in Transformers, and how far padded copies of them are apart.

A stock model is built once for a test process. Its copies are made in memory: the padded config
and the padded tensors, under the names that the Hub has, are given to the same class. In fp64 what
Transformers computes in fp32 by itself (norms, routers, decays, softmax) is computed in fp64 too,
so that nothing but the order of additions is left between the two.

The bound is measured: the stock model's own error in fp32 against fp64, times the ratio of the two
roundings where both are fp64. A padded model may err twice as far as the stock one does; two fp64
results are thus apart by three times that.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import PreTrainedConfig

from tests.pad import gqa, latent
from tp3.pad.catalogue import Catalogue, Entry
from tp3.pad.configs import read_config
from tp3.pad.planner import Plan
from tp3.pad.weights import pad_tensor, spelled

TINY: dict[str, dict[str, Any]] = {**gqa.TINY, **latent.TINY}
TINY["qwen3_5_moe_text"] = TINY["qwen3_5_moe"]["text_config"] | {"model_type": "qwen3_5_moe_text"}
# Transformers 5.24 runs no Llama 4 without an image, and sizes OLMoE's norms by the hidden size.
NOT_RUN = ("llama4", "olmoe")
RUN = tuple(name for name in TINY if name not in NOT_RUN)
TOKENS = 96  # trained; every tiny model has as many
LENGTHS = {"deepseek_v4": 136}  # past a compressed block of 128
# Sizes of a padded model that Transformers refuses to read, and computes with when they are set.
REFUSED_SIZES = ("llama", "gemma2", "gemma3", "gemma3_text", "deepseek_v2")
torch.set_num_threads(1)  # tiny products; several test processes to a core
transformers.utils.logging.disable_progress_bar()

# 5 Mamba heads of 8 are the hidden size of 40: Transformers wants a whole mamba_expand.
ASKED = {
    "granitemoehybrid": {"mamba_heads": 5},
    "granitemoehybrid-dense": {"mamba_heads": 5},
}
# Chunks of a scan are filled up with zeros; short ones cost less, and hand states on.
MAMBA = ("bamba", "falcon_h1", "granitemoehybrid")
CHUNKS = dict.fromkeys(MAMBA, "mamba_chunk_size") | {"nemotron_h": "chunk_size"}
DOUBLE = 2.0**-29  # fp64's rounding by fp32's

Weights = dict[str, Tensor]
Broken = Callable[[Entry], Entry]


@dataclass(frozen=True)
class Stock:
    """A random model: its class, its config and its tensors (fp64) as saved."""

    name: str
    kind: Any
    config: Mapping[str, Any]
    weights: Weights

    @cached_property
    def tokens(self) -> Tensor:
        return torch.arange(LENGTHS.get(self.name, 24))[None] * 7 % TOKENS

    @cached_property
    def exact(self) -> Tensor:
        """Its logits in fp64."""
        return logits(self, self.config, self.weights, {}, torch.float64)

    @cached_property
    def single(self) -> Tensor:
        """And in fp32."""
        return logits(self, self.config, self.weights, {}, torch.float32)

    @cached_property
    def rounding(self) -> float:
        """How far these are apart."""
        return apart(self.single, self.exact)

    @property
    def bound(self) -> float:
        """How far padded logits may be from the stock ones, both fp64."""
        return 3 * self.rounding * DOUBLE


@cache
def stock_model(name: str) -> Stock:
    return random_model(name, TINY[name])


def random_model(name: str, config: Mapping[str, Any]) -> Stock:
    """A random model of a config, no tensor left at a value that hides an error; its weights are
    numbers that fp32 has, since Transformers keeps some routers in that.
    """
    config = dict(config)
    if config["model_type"] not in transformers.CONFIG_MAPPING:
        pytest.skip(f"this Transformers has no {config['model_type']}")
    if config["model_type"] in CHUNKS:
        config = config | {CHUNKS[config["model_type"]]: 8}
    kind = latent.auto_class(config)
    with warnings.catch_warnings(), TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        tensors = latent.save(config, Path(folder))
        saved = read_config(folder)
    weights = {each: _random(each, tensor) for each, tensor in tensors.items()}
    return Stock(name, kind._model_mapping[type(_read(saved))], saved, weights)


def _random(name: str, tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return torch.randint_like(tensor, 3)
    noise = torch.randn_like(tensor.float())
    if name.endswith("A_log"):
        noise = noise.sigmoid()
    elif tensor.ndim < 2:
        noise = tensor.mean() + 0.3 * noise
    else:
        noise *= tensor.shape[-1] ** -0.5
    return noise.double()


def padded_copy(stock: Stock, planned: Plan, broken: Mapping[str, Broken] | None = None) -> Weights:
    """The padded tensors. broken: by a pattern of names, what is done to a tensor's entry before it
    is padded; a pattern that no tensor has is an error.
    """
    catalogue, broken, used = Catalogue(planned), broken or {}, set()
    made = {}
    for name, tensor in stock.weights.items():
        entry = catalogue.entry(name, tuple(tensor.shape), spelled(tensor.dtype))
        for pattern, change in broken.items():
            if re.search(pattern, name):
                entry = change(entry)
                used.add(pattern)
        made[name] = pad_tensor(entry, tensor)
    assert used == set(broken), f"no tensor of {stock.name} matches {set(broken) - used}"
    assert not catalogue.missing(made)
    return made


def padded_logits(
    stock: Stock,
    planned: Plan,
    dtype: torch.dtype = torch.float64,
    broken: Mapping[str, Broken] | None = None,
    factors: Mapping[str, float] | None = None,
) -> Tensor:
    """Logits of a padded copy, its tail included. factors: of eps, if not those of the plan."""
    config = planned.padded_config(stock.config)
    if factors is None:
        factors = config.get("tp3", {}).get("norm_eps_factors", {})
    return logits(stock, config, padded_copy(stock, planned, broken), factors, dtype)


def logits(
    stock: Stock,
    config: Mapping[str, Any],
    weights: Weights,
    factors: Mapping[str, float],
    dtype: torch.dtype,
) -> Tensor:
    ours = _config(config, stock.config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, info = stock.kind.from_pretrained(
            None,
            config=ours,
            state_dict={name: tensor.clone() for name, tensor in weights.items()},
            dtype=dtype,
            experts_implementation="eager",
            output_loading_info=True,
        )
        assert not any(info.values()), info
        model = model.to(dtype)  # a router may be fp32 whatever is asked for
        _scale_eps(model, factors)
        with torch.inference_mode(), _all_in(dtype):
            return model.eval()(input_ids=stock.tokens, use_cache=False).logits.double()


def _config(values: Mapping[str, Any], stock: Mapping[str, Any]) -> Any:
    try:
        return _read(values)
    except StrictDataclassError:
        assert values["model_type"] in REFUSED_SIZES
        ours = _read(stock)
        _set(ours, values, stock)
        return ours


def _set(ours: Any, values: Mapping[str, Any], stock: Mapping[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(value, Mapping) and isinstance(getattr(ours, key, None), PreTrainedConfig):
            _set(getattr(ours, key), value, stock[key])
        elif stock.get(key) != value:
            setattr(ours, key, value)


def _read(values: Mapping[str, Any]) -> Any:
    """A config as Transformers reads it from a folder."""
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(values))
        return transformers.AutoConfig.from_pretrained(folder)


def _scale_eps(model: Any, factors: Mapping[str, float]) -> None:
    """What a host does for norms over a padded width."""
    for pattern, factor in factors.items():
        end = pattern.split("*")[-1]
        norms = [module for name, module in model.named_modules() if name.endswith(end)]
        assert norms, pattern
        for norm in norms:
            attribute = "variance_epsilon" if hasattr(norm, "variance_epsilon") else "eps"
            setattr(norm, attribute, getattr(norm, attribute) * factor)


@contextmanager
def _all_in(dtype: torch.dtype) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if dtype == torch.float64:
            for name in ("float32", "float"):
                patch.setattr(torch, name, torch.float64)
            patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        yield


def apart(ours: Tensor, exact: Tensor) -> float:
    """How far the trained logits are apart; infinite where one is no number."""
    worst = (ours[..., :TOKENS] - exact[..., :TOKENS]).abs().max()
    return float(worst) if worst.isfinite() else float("inf")


def tail(ours: Tensor) -> float:
    """The largest logit of a token that only the padded model has."""
    return float(ours[..., TOKENS:].abs().max()) if ours.shape[-1] > TOKENS else 0.0
