"""What a rank holds under a plan: bytes of weights, bytes of cache per token. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from tp3.pad.extent import sections
from tp3.pad.formats import Format
from tp3.pad.model import Model, Rule
from tp3.pad.spread import Spread

PLAIN_BYTES = 2  # of a weight or a cached entry that is not quantised


@dataclass(frozen=True)
class Ledger:
    """Bytes on one rank. stock_bytes: what an equal share of the trained weights would be."""

    weight_bytes: int
    stock_bytes: int
    kv_bytes_per_token: int

    @property
    def overhead(self) -> float:
        """The share of a rank's weights that the trained ones would not take."""
        return self.weight_bytes / self.stock_bytes - 1


def account(model: Model, form: Format, spreads: Mapping[str, Spread], tp: int) -> Ledger:
    """Tensors with an axis are cut into ``tp`` parts along it, the others are on every rank."""
    padded = stock = 0.0
    for rule in model.rules:
        if rule.spare:
            continue
        copies = model.experts if "#" in rule.pattern else 1
        for layer in model.places(rule):
            each = form.bits_of(rule, layer) / 8
            entries = [_entries(rule, model, spreads, layer, sharing) for sharing in (tp, 1)]
            padded += each * copies * entries[0][0]
            stock += each * copies * (entries[1][1] / tp if entries[1][2] else entries[1][1])
    return Ledger(round(padded), round(stock), sum(cached_by_layer(model, spreads, tp).values()))


def _entries(
    rule: Rule, model: Model, spreads: Mapping[str, Spread], layer: int | None, tp: int
) -> tuple[int, int, bool]:
    """Entries of a tensor on a rank when padded, as trained in all, and whether it is cut."""
    sizes, suffix = model.sizes_in(layer), model.suffix_in(layer)
    local, whole, cut = [], [], False
    for dim in rule.dims:
        here = trained = 0
        for part in sections(dim, sizes, spreads):
            if part.axis is None:
                here, trained = here + part.unit, trained + part.unit
                continue
            spread = spreads.get(part.axis + suffix) or spreads[part.axis]
            cut = True
            here += part.unit * max(-(-spread.padded // tp), 1)
            trained += part.unit * spread.stock
        local.append(here)
        whole.append(trained)
    return prod(local), prod(whole), cut


def cached_by_layer(model: Model, spreads: Mapping[str, Spread], tp: int) -> dict[int, int]:
    """Bytes that a rank caches per token in each layer that caches at all."""
    found: dict[int, int] = {}
    for number, tags in enumerate(model.layers):
        for tag, extent in model.kv_entries.items():
            if tag in tags:
                entries = _entries(Rule("", (extent,)), model, spreads, number, tp)[0]
                found[number] = found.get(number, 0) + PLAIN_BYTES * entries
    return found
