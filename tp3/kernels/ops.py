"""The kernels as operators of torch, for torch.compile and CUDA graphs: ``torch.ops.tp3``.

``register`` makes them known; importing does not. A fake says shape and dtype of a result without
running anything. Arguments and errors are those of the launchers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tp3.kernels.fp8_linear import fp8_linear
from tp3.kernels.grouped_fp8_linear import grouped_fp8_linear
from tp3.kernels.mxfp4_linear import mxfp4_linear
from tp3.kernels.mxfp4_moe import mxfp4_moe

NAMESPACE = "tp3"


def _linear(x: torch.Tensor, weight: torch.Tensor, *_: Any) -> torch.Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=torch.bfloat16)


def _moe(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, expert_ids: torch.Tensor, *_: Any
) -> torch.Tensor:
    return x.new_empty((*expert_ids.shape, weight.shape[1]), dtype=torch.bfloat16)


def _grouped(x: torch.Tensor, weight: torch.Tensor, *_: Any) -> torch.Tensor:
    return x.new_empty((x.shape[0], *weight.shape[:2]), dtype=torch.bfloat16)


OPERATORS: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]] = {
    "mxfp4_linear(Tensor x, Tensor weight, Tensor scales, Tensor? x_scale=None) -> Tensor": (
        mxfp4_linear,
        _linear,
    ),
    "mxfp4_moe(Tensor x, Tensor weight, Tensor scales, Tensor expert_ids, "
    "Tensor? x_scale=None) -> Tensor": (mxfp4_moe, _moe),
    "fp8_linear(Tensor x, Tensor weight, Tensor weight_scale, Tensor? x_scale=None) -> Tensor": (
        fp8_linear,
        _linear,
    ),
    "grouped_fp8_linear(Tensor x, Tensor weight, Tensor weight_scale) -> Tensor": (
        grouped_fp8_linear,
        _grouped,
    ),
}

_registered: list[torch.library.Library] = []


def register() -> None:
    """Define the operators; a second call does nothing."""
    if _registered:
        return
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    _registered.append(library)
    for schema, (launcher, fake) in OPERATORS.items():
        name = library.define(schema)
        library.impl(name, launcher, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
