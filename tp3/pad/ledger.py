"""What a rank holds under a plan: bytes of weights, bytes of cache per token. No torch.

Layers of one kind (the same tags) are alike, so each kind is counted once and multiplied.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from tp3.pad.extent import sections
from tp3.pad.formats import Format
from tp3.pad.model import Model, Rule, Tags
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


@dataclass(frozen=True)
class Entries:
    """Of one tensor: on a rank when padded, as trained in all, and whether an axis cuts it."""

    local: int
    trained: int
    cut: bool


def account(model: Model, form: Format, spreads: Mapping[str, Spread], tp: int) -> Ledger:
    """Tensors with an axis are cut into ``tp`` parts along it, the others are on every rank."""
    padded = stock = 0.0
    for rule in model.rules:
        if rule.spare:
            continue
        copies = model.experts if "#" in rule.pattern else 1
        for layers in model.kinds_with(rule):
            entries = _entries(rule.dims, model, spreads, layers[0], tp)
            for bits, count in _bits(form, rule, layers).items():
                each = bits / 8 * copies * count
                padded += each * entries.local
                stock += each * entries.trained / (tp if entries.cut else 1)
    cached = cached_by_kind(model, spreads, tp, model.kv_entries)
    return Ledger(
        round(padded),
        round(stock),
        sum(size * len(model.kinds[tags]) for tags, size in cached.items()),
    )


def cached_by_kind(
    model: Model, spreads: Mapping[str, Spread], tp: int, extents: Mapping[str, str]
) -> dict[Tags, int]:
    """Bytes that a rank caches per token in a layer of each kind that caches at all. extents: as
    ``Model.kv_entries``, or some of them.
    """
    found: dict[Tags, int] = {}
    for tags, layers in model.kinds.items():
        for tag in tags & extents.keys():
            entries = _entries((extents[tag],), model, spreads, layers[0], tp).local
            found[tags] = found.get(tags, 0) + PLAIN_BYTES * entries
    return found


def cached_by_layer(model: Model, spreads: Mapping[str, Spread], tp: int) -> dict[int, int]:
    """The same for each layer by its number."""
    found = cached_by_kind(model, spreads, tp, model.kv_entries)
    return {layer: size for tags, size in found.items() for layer in model.kinds[tags]}


def _bits(form: Format, rule: Rule, layers: tuple[int | None, ...]) -> Counter[float]:
    """How many of these layers store a weight in so many bits."""
    if not form.tells_layers_apart:
        return Counter({form.bits_of(rule, layers[0]): len(layers)})
    return Counter(form.bits_of(rule, layer) for layer in layers)


def _entries(
    dims: tuple[str, ...],
    model: Model,
    spreads: Mapping[str, Spread],
    layer: int | None,
    tp: int,
) -> Entries:
    sizes, suffix = model.sizes_in(layer), model.suffix_in(layer)
    local, whole, cut = [], [], False
    for dim in dims:
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
    return Entries(prod(local), prod(whole), cut)
