"""Ways to plan one tensor wrongly. Each takes its right entry and gives the wrong one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tp3.pad.catalogue import Entry
from tp3.pad.spread import Spread, appended, joined, picked

Break = Callable[[Entry], Entry]


def filled(number: float) -> Break:
    """Another number where nothing was trained."""

    def other(entry: Entry) -> Entry:
        assert entry.padded != entry.stock, f"{entry.name}: nothing to fill"
        return replace(entry, fill=number)

    return other


def uncorrected(entry: Entry) -> Entry:
    """The trained weight of a norm as it is."""
    assert entry.factor != 1.0
    return replace(entry, factor=1.0)


def moved(dim: int) -> Break:
    """All entries one place further, the last one first."""
    return _other(dim, lambda axis: picked(axis.stock, _turned(axis.sources, 1)))


def zeros_first(dim: int) -> Break:
    """Zeros before the trained entries, not after them."""
    return _other(dim, lambda a: Spread(a.stock, ((None, a.padded - a.stock), (0, a.stock))))


def zeros_last(dim: int) -> Break:
    """All trained entries in one piece, all zeros after them."""
    return _other(dim, lambda axis: appended(axis.stock, axis.padded))


def in_sections(dim: int, *units: int) -> Break:
    """Interleaved units read as sections one after another, padded each. units: entries that a
    section has of a unit.
    """

    def sections(axis: Spread) -> Spread:
        stock, padded = axis.stock // sum(units), axis.padded // sum(units)
        return joined(appended(stock * each, padded * each) for each in units)

    return _other(dim, sections)


def other_copies(dim: int, unit: int, num_copies: int) -> Break:
    """Copied units as 0 1 0 1 where they are 0 0 1 1."""

    def dealt(axis: Spread) -> Spread:
        whole = axis.stock // unit
        order = [each * unit + at for each in range(whole) for at in range(unit)] * num_copies
        return picked(axis.stock, order)

    return _other(dim, dealt)


def once(dim: int) -> Break:
    """A copied entry where it is first, zeros where it is again."""

    def first(axis: Spread) -> Spread:
        sources = axis.sources
        return picked(
            axis.stock,
            (None if source in sources[:at] else source for at, source in enumerate(sources)),
        )

    return _other(dim, first)


def copies_for_zeros(dim: int) -> Break:
    """Trained entries again where zeros should be."""
    return _other(
        dim, lambda axis: picked(axis.stock, (n % axis.stock for n in range(axis.padded)))
    )


def backwards(dim: int) -> Break:
    """The entries in the opposite order, such as experts by a router that numbers them so."""
    return _other(dim, lambda axis: picked(axis.stock, reversed(axis.sources)))


def _other(dim: int, change: Callable[[Spread], Spread]) -> Break:
    def broken(entry: Entry) -> Entry:
        spreads = list(entry.spreads)
        spreads[dim] = change(spreads[dim])
        assert spreads[dim] != entry.spreads[dim], f"{entry.name}: nothing is broken"
        assert spreads[dim].padded == entry.spreads[dim].padded
        return replace(entry, spreads=tuple(spreads))

    return broken


def _turned(sources: tuple[int | None, ...], by: int) -> tuple[int | None, ...]:
    return sources[-by:] + sources[:-by]
