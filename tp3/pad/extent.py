"""The length of a tensor's dimension, written in the names of a model's sizes and axes. No torch.

Sections are added, factors multiplied: ``q_heads*head_dim + 2*kv_heads*head_dim`` is a fused qkv,
``intermediate + intermediate`` gate above up, ``2*intermediate`` gate and up interleaved. A factor
that is an axis counts its units; the others make up one unit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from tp3.pad.spread import Spread, joined, kept


@dataclass(frozen=True)
class Section:
    """``unit`` entries for each unit of ``axis``, or ``unit`` entries that no axis counts."""

    axis: str | None
    unit: int


def sections(text: str, sizes: Mapping[str, int], axes: Mapping[str, object]) -> list[Section]:
    """The sections of an extent. Errors: KeyError for a name that is neither size nor axis."""
    out = []
    for term in _terms(text):
        counted = [name for name in term if name in axes]
        assert len(counted) <= 1, f"{text}: a section counts one axis, not {counted}"
        unit = prod(
            int(name) if name.isdigit() else sizes[name] for name in term if name not in axes
        )
        out.append(Section(counted[0] if counted else None, unit))
    return out


def spread_of(text: str, sizes: Mapping[str, int], spreads: Mapping[str, Spread]) -> Spread:
    """The dimension in entries: as trained, and where each padded entry comes from."""
    return joined(
        kept(part.unit) if part.axis is None else spreads[part.axis].scaled(part.unit)
        for part in sections(text, sizes, spreads)
    )


@lru_cache(maxsize=1024)
def _terms(text: str) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(factor.strip() for factor in term.split("*")) for term in text.split("+"))
