"""The smallest padding of a published config, found by trying sizes. Knows nothing of the planner.

Sizes are read from the config's own keys; which parts of a model are quantised, and the block that
a rank must have whole, were read off the configs by eye. A block is (rows, columns) of a weight
[N, K]. Grouped query heads: ``brute_heads``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from math import lcm
from pathlib import Path
from typing import Any

Values = dict[str, Any]
Parts = dict[str, tuple[int, int]]

DATA = Path(__file__).parent / "data"
OTHERS = ("Falcon-H1-34B", "GLM-4.7-Flash", "GLM-5.3-Flash", "Granite-4-H-Small", "Kimi-Linear")
CONFIGS: dict[str, Values] = json.loads((DATA / "published.json").read_text())
LATENT = json.loads((DATA / "latent_real.json").read_text())
CONFIGS |= {name: LATENT[name] for name in OTHERS}

PLAIN, FP8, BLOCKS, NVFP4, MXFP4, INT4 = (1, 1), (1, 16), (128, 128), (1, 16), (1, 32), (64, 128)


def parts(names: str, block: tuple[int, int]) -> Parts:
    return dict.fromkeys(names.split(), block)


LATENT_PARTS = "attention output dense experts shared"
QUANTISED: dict[str, Parts] = {
    "MiniMax-M2.5": parts("attention output experts", BLOCKS),
    "Qwen3-235B-A22B-FP8": parts("attention output experts", BLOCKS),
    "Qwen3-30B-A3B-FP8": parts("attention output experts", BLOCKS),
    "Qwen3-32B-FP8-Static-PerTensor": parts("attention output dense", FP8),
    "Qwen3-32B-FP8": parts("attention output dense", BLOCKS),
    "DeepSeek-R1": parts(LATENT_PARTS, BLOCKS),
    "DeepSeek-V3.2": parts(LATENT_PARTS, BLOCKS),
    "DeepSeek-V4-Flash": parts("attention output shared", BLOCKS) | parts("experts", MXFP4),
    "DeepSeek-V4-Pro": parts("attention output shared", BLOCKS) | parts("experts", MXFP4),
    "DeepSeek-V4-Flash-NVFP4": parts("attention output shared", BLOCKS) | parts("experts", NVFP4),
    "DeepSeek-V4-Flash-FP8": parts(LATENT_PARTS, BLOCKS),
    "DeepSeek-V4-Pro-FP8": parts(LATENT_PARTS, BLOCKS),
    "Kimi-K2-Instruct": parts(LATENT_PARTS, BLOCKS),
    "Kimi-K2.5": parts("experts", INT4),
    "Kimi-K2.5-NVFP4": parts("dense experts shared", NVFP4),
    "Kimi-K2.6-NVFP4": parts("experts", NVFP4),
    "DeepSeek-V3.1-NVFP4": parts("output dense experts shared", NVFP4),
    "DeepSeek-V3.2-NVFP4": parts("output dense experts shared", NVFP4),
    "GLM-5-NVFP4": parts("dense experts shared", NVFP4),
    "GLM-5.1-NVFP4": parts("experts", NVFP4),
    "GLM-5.2-NVFP4": parts("experts", NVFP4),
    "GLM-5-FP8": parts(LATENT_PARTS, BLOCKS),
    "GLM-4.7-Flash": parts(LATENT_PARTS, BLOCKS),
    "Kimi-Linear": parts(LATENT_PARTS + " linear", BLOCKS),
    "Gemma-4-31B-IT-NVFP4": parts("dense", NVFP4),
    "Llama-3.1-70B-Instruct-FP8": parts("attention output dense", FP8),
    "MiniMax-M2.5-NVFP4": parts("experts", NVFP4),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4": parts("linear experts shared", NVFP4),
    "NVIDIA-Nemotron-3-Super-120B-A12B-FP8": parts(LATENT_PARTS + " linear", FP8),
    "NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4": parts(LATENT_PARTS + " linear", NVFP4),
    "Qwen3-235B-A22B-NVFP4": parts("attention output experts", NVFP4),
    "Qwen3.5-122B-A10B-NVFP4": parts("experts", NVFP4),
    "Qwen3.5-397B-A17B-NVFP4": parts("experts", NVFP4),
    "Qwen3.6-27B-NVFP4": parts("attention output linear", FP8) | parts("dense", NVFP4),
    "Qwen3.6-35B-A3B-NVFP4": parts("attention output linear", FP8) | parts("experts shared", NVFP4),
    "gpt-oss-120b": parts("experts", MXFP4),
    "gpt-oss-20b": parts("experts", MXFP4),
}


@dataclass(frozen=True)
class Counted:
    """An axis that is appended to. cuts: (entries to a unit, block that must stay whole). tile:
    what a rank's share must divide by once it grows. tied: other axes, so many units to one here.
    """

    axis: str
    stock: int
    cuts: tuple[tuple[int, int], ...]
    tile: int = 1
    tied: dict[str, int] = field(default_factory=dict)

    def fits(self, size: int, tp: int) -> bool:
        local = size // tp
        whole = all(local * entries % block == 0 for entries, block in self.cuts)
        return size % tp == 0 and whole and (size == self.stock or local % self.tile == 0)

    def smallest(self, tp: int) -> dict[str, int]:
        size = next(size for size in count(self.stock) if self.fits(size, tp))
        return {self.axis: size, **{name: size * each for name, each in self.tied.items()}}


def text_of(config: Values) -> Values:
    text: Values = config.get("text_config", config)
    return text


WIDTHS = {
    "intermediate": ("dense", "dense_intermediate_size intermediate_size"),
    "moe_intermediate": ("experts", "moe_intermediate_size intermediate_size"),
    "shared_intermediate": (
        "shared",
        "shared_intermediate_size shared_expert_intermediate_size "
        "moe_shared_expert_intermediate_size",
    ),
}


def axes(name: str) -> list[Counted]:
    """The axes that are only appended to, of a published config."""
    config, quantised = text_of(CONFIGS[name]), QUANTISED.get(name, {})
    return [
        each
        for maker in (_widths, _attention, _linear, _mamba)
        for each in maker(config, quantised)
    ]


def _widths(config: Values, quantised: Parts) -> Iterator[Counted]:
    """Shared experts of latent models are so many experts wide: a config has no other number."""
    latent = "kv_lora_rank" in config or "o_groups" in config
    shared = config.get("n_shared_experts") or config.get("num_shared_experts") or 0
    for axis, (part, keys) in WIDTHS.items():
        stock = next((config[key] for key in keys.split() if config.get(key)), 0)
        limits, tied = cuts(quantised, part, (1,), (1,)), {}
        if latent and axis == "moe_intermediate":
            limits += cuts(quantised, "shared", (shared,), (shared,))
            tied = {"shared_intermediate": shared}
        if stock:
            yield Counted(axis, stock, limits, 16, tied)


def _attention(config: Values, quantised: Parts) -> Iterator[Counted]:
    """Latent heads; groups of heads that share an output projection."""
    q = config["num_attention_heads"]
    if "o_groups" in config:
        groups, low = config["o_groups"], config["o_lora_rank"]
        rows = (q // groups * config["head_dim"], low)
        limits = cuts(quantised, "attention", rows) + cuts(quantised, "output", (), (low,))
        yield Counted("o_groups", groups, limits, 1, {"q_heads": q // groups})
    elif "kv_lora_rank" in config:
        nope, value = config["qk_nope_head_dim"], config["v_head_dim"]
        rows = (nope + config["qk_rope_head_dim"], nope + value)
        limits = cuts(quantised, "attention", rows) + cuts(quantised, "output", (), (value,))
        yield Counted("q_heads", q, limits)


def _linear(config: Values, quantised: Parts) -> Iterator[Counted]:
    """Heads of delta attention; key heads with their value heads."""
    inner = config.get("linear_attn_config") or {}
    heads = inner.get("num_heads") or config.get("linear_num_heads")
    if heads:
        wide = (inner.get("head_dim") or config["linear_head_dim"],)
        yield Counted("kda_heads", heads, cuts(quantised, "linear", wide, wide))
    if keys := config.get("linear_num_key_heads"):
        each = config["linear_num_value_heads"] // keys
        wide = each * config["linear_value_head_dim"]
        limits = cuts(quantised, "linear", (config["linear_key_head_dim"], wide), (wide,))
        yield Counted("linear_key_heads", keys, limits, 1, {"linear_value_heads": each})


def _mamba(config: Values, quantised: Parts) -> Iterator[Counted]:
    """Whole groups; a single one grows inside."""
    heads = config.get("mamba_num_heads") or config.get("mamba_n_heads")
    if not heads:
        return
    groups = config.get("n_groups") or config["mamba_n_groups"]
    each, wide = heads // groups, config.get("mamba_head_dim") or config["mamba_d_head"]
    if groups == 1:
        yield Counted("mamba_heads", heads, cuts(quantised, "linear", (), (wide,)))
    else:
        limits = cuts(quantised, "linear", (), (each * wide,))
        yield Counted("mamba_groups", groups, limits, 1, {"mamba_heads": each})


def cuts(
    quantised: Parts, part: str, rows: tuple[int, ...], columns: tuple[int, ...] = ()
) -> tuple[tuple[int, int], ...]:
    """For entries to a unit the block of the part's format."""
    n, k = quantised.get(part, PLAIN)
    return *((each, n) for each in rows), *((each, k) for each in columns)


def vocabulary(size: int, tp: int) -> int:
    return next(padded for padded in count(size) if padded % lcm(64, tp) == 0)
