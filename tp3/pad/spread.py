"""Where each unit of a padded axis comes from: runs of trained units, and zeros. No torch.

An axis counts units (heads, columns, tokens). A spread says for every padded unit which trained
unit it copies, or that it is zero: the three ways to pad heads differ in nothing else.

    Spread(3, ((0, 3), (None, 1))).sources == (0, 1, 2, None)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

Run = tuple[int | None, int]  # first trained unit (None: zeros), number of units


@dataclass(frozen=True)
class Spread:
    """``stock`` units as trained, and the runs that make up the padded axis."""

    stock: int
    runs: tuple[Run, ...]

    def __post_init__(self) -> None:
        if self.stock < 1 or not self.runs:
            raise ValueError(f"an axis needs at least one unit, got {self.stock}: {self.runs}")
        for first, count in self.runs:
            assert count > 0
            assert first is None or 0 <= first <= self.stock - count, (first, count, self.stock)

    @cached_property
    def padded(self) -> int:
        return sum(count for _, count in self.runs)

    @cached_property
    def inert(self) -> bool:
        """Whether the axis stays as it is."""
        return self.runs == ((0, self.stock),)

    @property
    def appends(self) -> bool:
        """Whether all trained units come first, in order, and zeros after them."""
        return self.runs[0] == (0, self.stock) and all(first is None for first, _ in self.runs[1:])

    @property
    def sources(self) -> tuple[int | None, ...]:
        """For each padded unit the trained one it copies, None for zero."""
        out: list[int | None] = []
        for first, count in self.runs:
            out += [None] * count if first is None else range(first, first + count)
        return tuple(out)

    def scaled(self, unit: int) -> Spread:
        """The same axis in entries, ``unit`` of them to a unit."""
        runs = (
            (None if first is None else first * unit, count * unit) for first, count in self.runs
        )
        return Spread(self.stock * unit, tuple(runs))

    def in_blocks(self, block: int) -> Spread | None:
        """The same axis in blocks of ``block`` entries, the last of which may be short; None where
        a run begins or ends inside a block that it shares with another trained one.
        """
        if self.appends:
            stock, padded = -(-self.stock // block), -(-self.padded // block)
            return appended(stock, padded)
        if any(count % block or (first or 0) % block for first, count in self.runs):
            return None
        runs = (
            (None if first is None else first // block, count // block)
            for first, count in self.runs
        )
        return Spread(-(-self.stock // block), tuple(runs))


def kept(stock: int) -> Spread:
    """An axis that stays as it is."""
    return Spread(stock, ((0, stock),))


def appended(stock: int, padded: int) -> Spread:
    """Zeros after the trained units."""
    assert padded >= stock, f"{stock} units would shrink to {padded}"
    return kept(stock) if padded == stock else Spread(stock, ((0, stock), (None, padded - stock)))


def picked(stock: int, sources: Iterable[int | None]) -> Spread:
    """A spread from its sources, neighbours joined into runs."""
    runs: list[Run] = []
    for source in sources:
        if runs:
            first, count = runs[-1]
            joins = source is None if first is None else source == first + count
            if joins:
                runs[-1] = (first, count + 1)
                continue
        runs.append((source, 1))
    return Spread(stock, tuple(runs))


def joined(parts: Iterable[Spread]) -> Spread:
    """Sections one after another, such as the q, k and v of a fused projection."""
    runs: list[Run] = []
    offset = 0
    for part in parts:
        runs += [(None if first is None else first + offset, count) for first, count in part.runs]
        offset += part.stock
    merged: list[Run] = []
    for first, count in runs:
        if merged:
            before, length = merged[-1]
            if (first is None and before is None) or (
                first is not None and before is not None and first == before + length
            ):
                merged[-1] = (before, length + count)
                continue
        merged.append((first, count))
    return Spread(offset, tuple(merged))
