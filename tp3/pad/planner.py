"""``plan(config, tp=3)``: the smallest sizes at which every rank gets a whole share. No torch.

A plan says for each axis of the model where its padded units come from (``spread``), and for the
model what a rank holds. What limits the sizes is collected from the rules: every quantised tensor
that is cut along an axis must leave each rank whole blocks, and a caller may ask for more
(``local_multiple``).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import gcd, lcm
from typing import Any

from tp3.pad import heads as ways
from tp3.pad.choice import choose, listed, nothing_serves, query_axes
from tp3.pad.corrections import eps_factors
from tp3.pad.extent import spread_of
from tp3.pad.families import read_model
from tp3.pad.formats import ALIGNMENT, Format, read_format
from tp3.pad.head_plans import head_ways
from tp3.pad.ledger import Ledger, account, cached_by_layer
from tp3.pad.model import HeadAxes, Model, Units, Vocabulary, Width
from tp3.pad.needs import Needs, names_of
from tp3.pad.positions import slopes
from tp3.pad.spread import Spread, appended

STRATEGIES = ("auto", *ways.STRATEGIES)
VOCABULARY_MULTIPLE = 64
# What kernels for unquantised weights like of a rank's columns; asked only where a width must grow.
WIDTH_MULTIPLE = 16


@dataclass(frozen=True)
class Axis:
    """One planned size: as trained, as padded, per rank, and why."""

    name: str
    stock: int
    padded: int
    per_rank: int
    reason: str


@dataclass(frozen=True)
class Plan:
    """A model at one tensor-parallel size. ``rejected``: what else would do, and why not.
    ``also_tp``: other sizes that the same padding serves.
    """

    model: Model
    format: Format
    tp: int
    strategy: str
    axes: tuple[Axis, ...]
    spreads: Mapping[str, Spread]
    rejected: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    also_tp: tuple[int, ...] = ()

    @property
    def inert(self) -> bool:
        return all(spread.inert for spread in self.spreads.values())

    @property
    def padded_sizes(self) -> dict[str, int]:
        return {axis.name: axis.padded for axis in self.axes}

    @cached_property
    def ledger(self) -> Ledger:
        """What a rank holds."""
        return account(self.model, self.format, self.spreads, self.tp)

    @cached_property
    def kv_bytes_per_layer(self) -> dict[int, int]:
        """Bytes that a rank caches per token in each layer that caches."""
        return cached_by_layer(self.model, self.spreads, self.tp)

    def padded_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """A copy of `config` that fits the padded weights, the trained sizes under the key `tp3`;
        unchanged when the plan is inert.
        """
        padded: dict[str, Any] = copy.deepcopy(dict(config))
        if self.inert:
            return padded
        stock: dict[str, int | float] = {}
        for path, value in self.model.pins.items():
            _put(padded, path, value)
        for axis in self.axes:
            for path in self.model.paths.get(axis.name, ()):
                if axis.padded != axis.stock:
                    stock[path] = axis.stock
                _put(padded, path, axis.padded)
        for path, text in self.model.lengths.items():
            extent, _, size = text.partition("/")
            length = spread_of(extent, self.model.sizes, self.spreads)
            parts = self.model.sizes[size.strip()] if size else 1
            if not length.inert:
                stock[path] = _share(length.stock, parts)
            _put(padded, path, _share(length.padded, parts))
        padded["tp3"] = {"tp": self.tp, "strategy": self.strategy, "stock": stock}
        if factors := eps_factors(self.model, self.spreads):
            padded["tp3"]["norm_eps_factors"] = factors
        if self.also_tp:
            padded["tp3"]["also_tp"] = list(self.also_tp)
        return padded


def plan(
    config: Mapping[str, Any],
    *,
    tp: int = 3,
    strategy: str = "auto",
    local_multiple: Mapping[str, int] | None = None,
    kv_bytes: int | None = None,
    kv_bytes_per_layer: int | None = None,
    also_tp: Iterable[int] = (),
    alignment: Mapping[str, tuple[int, int]] | None = None,
) -> Plan:
    """The smallest padding of the model that `config` describes at `tp` ranks.

    strategy: one way to pad heads, or ``auto``: the fewest bytes per rank among those that cache in
    no layer more per token than ``append``. local_multiple: for an axis, what a rank's share must
    divide by. kv_bytes: what a rank's cache must take per token; kv_bytes_per_layer: the same in
    each layer that caches (a partner model's, ``Plan.kv_bytes_per_layer``). also_tp: other sizes
    that the same padding must serve. alignment: for a format, what an engine's kernels want of a
    rank's N and K beside what all want (``formats.ALIGNMENT``). Errors: ValueError in one sentence
    when the config is not understood or nothing serves.
    """
    sizes = (tp, *also_tp)
    for size in sizes:
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"tp must be a positive integer, got {size!r}")
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy must be one of {', '.join(STRATEGIES)}, got {strategy!r}")
    strange = sorted(set(alignment or ()) - set(ALIGNMENT))
    if strange:
        raise ValueError(f"alignment of {strange[0]}: the formats are {', '.join(ALIGNMENT)}")
    model, form = read_model(config), read_format(config)
    asked = dict(local_multiple or {})
    needs = [Needs(model, form, size, asked, alignment) for size in sizes]
    names = needs[0].names
    unknown = sorted(set(asked) - names)
    if unknown:
        raise ValueError(
            f"local multiple of {unknown[0]}: the model's axes are {', '.join(sorted(names))}"
        )
    fixed, why = _fixed(model, Needs(model, form, lcm(*sizes), asked, alignment))
    plans = [
        Plan(
            model,
            form,
            tp,
            way,
            *_axes(model, tp, {**fixed, **spreads}, why),
            notes=model.notes,
            also_tp=sizes[1:],
        )
        for way, spreads in head_ways(model, needs, strategy, kv_bytes_per_layer)
    ]
    if kv_bytes is not None:
        plans = [p for p in plans if p.ledger.kv_bytes_per_token == kv_bytes]
    if kv_bytes_per_layer is not None:
        plans = [p for p in plans if set(p.kv_bytes_per_layer.values()) <= {kv_bytes_per_layer}]
    if place := slopes(config):
        plans = [p for p in plans if all(p.spreads[name].inert for name in query_axes(model))]
        if not plans:
            raise ValueError(
                f"{place}: a head's slope is made from the number of query heads, which "
                f"{listed(sizes)} ranks would change"
            )
    if not plans:
        raise ValueError(nothing_serves(model, sizes, strategy, kv_bytes, kv_bytes_per_layer))
    return choose(plans)


def _fixed(model: Model, needs: Needs) -> tuple[dict[str, Spread], dict[str, str]]:
    """The axes that have one way to grow."""
    spreads, why = {}, {}
    tp = needs.tp
    for axis in model.axes:
        if isinstance(axis, Units | Width):
            share = needs.share(axis.name)
            for name, each in axis.tied.items():
                share = lcm(share, needs.share(name) // gcd(needs.share(name), each))
            if isinstance(axis, Width) and axis.count % (tp * share):
                share = lcm(share, WIDTH_MULTIPLE)
            padded = _up(axis.count, tp * share)
            spreads[axis.name] = appended(axis.count, padded)
            why[axis.name] = _multiple(tp, share)
            for name, each in axis.tied.items():
                spreads[name] = appended(axis.count * each, padded * each)
                why[name] = f"{each} for each of {axis.name}"
        elif isinstance(axis, Vocabulary):
            multiple = lcm(VOCABULARY_MULTIPLE, tp, tp * needs.share(axis.name))
            padded = axis.count if tp == 1 else _up(axis.count, multiple)
            spreads[axis.name] = appended(axis.count, padded)
            why[axis.name] = f"multiple of lcm({VOCABULARY_MULTIPLE}, {tp})"
    return spreads, why


def _axes(
    model: Model, tp: int, spreads: Mapping[str, Spread], why: Mapping[str, str]
) -> tuple[tuple[Axis, ...], dict[str, Spread]]:
    axes = []
    for axis in model.axes:
        for name in names_of(axis):
            spread = spreads[name]
            reason = why.get(name) or _heads_reason(axis, name, spreads, tp)
            if spread.inert:
                reason = f"already fits: {reason}"
            per_rank = max(spread.padded // tp, 1)
            axes.append(Axis(name, spread.stock, spread.padded, per_rank, reason))
    return tuple(axes), dict(spreads)


def _heads_reason(axis: Any, name: str, spreads: Mapping[str, Spread], tp: int) -> str:
    assert isinstance(axis, HeadAxes)
    q, kv = (spreads[each].padded for each in axis.names)
    if name == axis.names[0]:
        return f"{kv} KV heads, {q // kv} query heads to each"
    return f"multiple of {tp}" if kv % tp == 0 else f"{tp // kv} ranks to a KV head"


def _multiple(tp: int, share: int) -> str:
    return f"multiple of {tp}" if share == 1 else f"multiple of {tp} × {share}"


def _share(length: int, parts: int) -> int | float:
    """A quotient, whole where it is."""
    return length / parts if length % parts else length // parts


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _put(config: dict[str, Any], path: str, value: Any) -> None:
    """Set a dotted path; a folder that is not there is made."""
    *folders, last = path.split(".")
    for folder in folders:
        config = config.setdefault(folder, {})
    config[last] = value
