"""`padded_weights` wraps a stream of `(name, tensor)` and pads one tensor at a time.

A tensor that needs nothing is handed on as the same object. Coverage is proven: a tensor that is no
part of the model, a shape that is not the config's, and at the end of the stream a tensor that
never came are each a ValueError naming it; `strict=False` makes them warnings and hands such
tensors on untouched. An inert plan returns the caller's own stream, unless a tally is asked for.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product

import torch
from torch import Tensor

from tp3.pad import scales
from tp3.pad.catalogue import Catalogue, Entry
from tp3.pad.planner import Plan
from tp3.pad.room import Room
from tp3.pad.spread import Spread

Empty = Callable[[Tensor, Sequence[int]], Tensor]  # a new tensor of a shape, like another

# How safetensors spells a dtype.
SPELLING = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0",
    "float4_e2m1fn_x2": "F4", "uint8": "U8", "int8": "I8", "int16": "I16", "int32": "I32",
    "uint32": "U32", "int64": "I64",
}  # fmt: skip


@dataclass
class Tally:
    """What went through the stream: the names in their order, and a line for each padded kind."""

    names: dict[str, None] = field(default_factory=dict)
    catalogue: Catalogue | None = None

    def lines(self) -> list[str]:
        """Such as `self_attn.q_proj.weight 16 × [12288 → 18432]`."""
        return self.catalogue.lines(self.names) if self.catalogue else []


def padded_weights(
    weights: Iterable[tuple[str, Tensor]],
    plan: Plan,
    *,
    strict: bool = True,
    tally: Tally | None = None,
    scale_fill: str = "nearest",
    whole: bool = True,
) -> Iterator[tuple[str, Tensor]]:
    """The same stream in the same order, padded as `plan` says; `tally` is filled on the way.

    scale_fill: what a quantised weight's scales are where nothing was trained; `nearest` real
    group's, or for a kernel that needs it `one`, `zero` or `2^-127` (e8m0 alone). whole: all of the
    checkpoint comes; else what never came is no error.
    """
    catalogue = Catalogue(plan, scale_fill=scale_fill)
    if plan.inert and tally is None:
        return iter(weights)
    tally = tally if tally is not None else Tally()
    tally.catalogue = catalogue
    return _stream(weights, catalogue, strict, tally, whole)


def _stream(
    weights: Iterable[tuple[str, Tensor]],
    catalogue: Catalogue,
    strict: bool,
    tally: Tally,
    whole: bool,
) -> Iterator[tuple[str, Tensor]]:
    room = Room()
    for name, tensor in weights:
        try:
            if name in tally.names:
                raise ValueError(f"tensor {name} came twice")
            tally.names[name] = None
            entry = catalogue.entry(name, tuple(tensor.shape), spelled(tensor.dtype))
        except ValueError as error:
            _reject(error, strict)
            yield name, tensor
            continue
        box = [pad_tensor(entry, tensor, room)]
        del tensor  # while the consumer works, this frame holds neither of the two
        yield name, box.pop()
    for name in catalogue.missing(tally.names) if whole else ():
        _reject(ValueError(f"tensor {name} is missing"), strict)


def pad_tensor(entry: Entry, tensor: Tensor, empty: Empty = Tensor.new_empty) -> Tensor:
    """A new tensor of `entry.padded`, or the same object where nothing changes. Shape and dtype are
    those that the entry was made for.
    """
    if entry.inert:
        return tensor
    if entry.fill == "group" or entry.fill == "act order":
        return _groups(entry, tensor)
    if entry.group:
        assert isinstance(entry.fill, str)
        return tensor.new_tensor([int(size) for size in entry.fill.split()])
    if isinstance(entry.fill, str):
        return scales.pad(tensor, entry.spreads, entry.fill)
    trained = tensor if entry.factor == 1.0 else (tensor.double() * entry.factor).to(tensor.dtype)
    return _spread(trained, entry.spreads, entry.fill, empty)


def _spread(
    tensor: Tensor, spreads: tuple[Spread, ...], fill: float, empty: Empty = Tensor.new_empty
) -> Tensor:
    wide = empty(tensor, tuple(spread.padded for spread in spreads))
    source, target = _raw(tensor), _raw(wide)
    for pieces in product(*(list(runs(spread)) for spread in spreads)):
        there = target[tuple(to for to, _ in pieces)]
        trained = tuple(of for _, of in pieces if of is not None)
        if len(trained) == len(pieces):
            there.copy_(source[trained])
        elif fill == 0.0:
            there.zero_()
        else:
            there.copy_(_raw(tensor.new_full((1,), fill)))
    return wide


def runs(spread: Spread) -> Iterator[tuple[slice, slice | None]]:
    """Where each run lies in the padded axis, and in the trained one; None: nothing was trained."""
    at = 0
    for first, count in spread.runs:
        yield slice(at, at + count), None if first is None else slice(first, first + count)
        at += count


def _raw(tensor: Tensor) -> Tensor:
    """The same memory; bytes, where a dtype of one byte has no arithmetic."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def _groups(entry: Entry, tensor: Tensor) -> Tensor:
    """The group of each column: as they lie, or, act-ordered, as trained and then new groups."""
    (spread,) = entry.spreads
    if entry.fill == "group":
        return (torch.arange(spread.padded, device=tensor.device) // entry.group).to(tensor.dtype)
    wide = _spread(tensor, entry.spreads, 0.0)
    dummy = torch.zeros(spread.padded, dtype=torch.bool)
    for to, of in runs(spread):
        dummy[to] = of is None
    extra = torch.arange(int(dummy.sum())) + spread.stock
    wide[dummy] = (extra // entry.group).to(wide.device, wide.dtype)
    return wide


def spelled(dtype: torch.dtype) -> str:
    """A dtype as safetensors spells it."""
    name = str(dtype).removeprefix("torch.")
    return SPELLING.get(name, name)


def _reject(error: ValueError, strict: bool) -> None:
    if strict:
        raise error
    warnings.warn(str(error), stacklevel=3)
