"""Heads of a whole model: a strategy for each geometry; several may share a size. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import product

from tp3.pad import heads as ways
from tp3.pad.ledger import cached_by_kind
from tp3.pad.model import HeadAxes, Model
from tp3.pad.needs import Needs
from tp3.pad.spread import Spread


def head_ways(
    model: Model, needs: list[Needs], strategy: str, layer_bytes: int | None
) -> Iterable[tuple[str, dict[str, Spread]]]:
    """For each strategy, and where the choice is free for each mixture of them, the spreads of all
    head axes; geometries that share a q count keep it.
    """
    axes = [axis for axis in model.axes if isinstance(axis, HeadAxes)]
    if not axes:
        yield "append", {}
        return
    free = strategy == "auto"
    alike = [(way,) * len(axes) for way in (ways.STRATEGIES if free else (strategy,))]
    mixed = product(ways.STRATEGIES, repeat=len(axes)) if free else ()
    seen: list[dict[str, Spread]] = []
    for chosen in dict.fromkeys((*alike, *mixed)):
        least: dict[tuple[str, ...], int] = {}
        while spreads := _each_way(model, axes, chosen, needs, layer_bytes, least):
            before = dict(least)
            for name, spread in spreads.items():
                place = model.paths.get(name, (name,))
                least[place] = max(least.get(place, 0), spread.padded)
            if all(
                spread.padded == least[model.paths.get(name, (name,))]
                for name, spread in spreads.items()
            ):
                if (chosen in alike or spreads not in seen) and _can_be_said(model, axes, spreads):
                    yield " and ".join(dict.fromkeys(chosen)), spreads
                seen.append(spreads)
                break
            assert least != before


def _can_be_said(model: Model, axes: list[HeadAxes], spreads: Mapping[str, Spread]) -> bool:
    """Whether the config can say these sizes: one that it has no key for is the trained multiple of
    the size without a suffix (MiMo-V2: twice the KV heads in sliding layers).
    """
    return all(
        name in model.paths
        or spreads[name].padded * spreads[base].stock == spreads[base].padded * spreads[name].stock
        for axis in axes
        for name in axis.names
        if axis.suffix and (base := name.removesuffix(axis.suffix)) in spreads
    )


def _each_way(
    model: Model,
    axes: list[HeadAxes],
    chosen: tuple[str, ...],
    needs: list[Needs],
    layer_bytes: int | None,
    least: Mapping[tuple[str, ...], int],
) -> dict[str, Spread]:
    """The smallest padding of each geometry by its strategy, empty where one has none. least: by
    its place in the config the least size of an axis, since geometries may share one.
    """
    spreads: dict[str, Spread] = {}
    for axis, way in zip(axes, chosen, strict=True):
        q_name, kv_name = axis.names
        q_least, kv_least = (least.get(model.paths.get(each, (each,)), 0) for each in axis.names)

        def fits(
            heads: ways.Heads,
            q_name: str = q_name,
            kv_name: str = kv_name,
            q_least: int = q_least,
            kv_least: int = kv_least,
            suffix: str = axis.suffix,
        ) -> bool:
            q, kv = heads.q.padded, heads.kv.padded
            return (
                q >= q_least
                and kv >= kv_least
                and all(
                    ways.serves(q, kv, need.tp)
                    and need.fits(q_name, q)
                    and need.parted(kv_name, kv)
                    and need.whole(q_name, heads.q)
                    and need.whole(kv_name, heads.kv)
                    and heads.kv_per_rank(need.tp) % need.share(kv_name) == 0
                    for need in needs
                )
                and (
                    layer_bytes is None
                    or _cached_in(model, suffix, heads, needs[0].tp) <= {layer_bytes}
                )
            )

        options = ways.candidates(axis.q, axis.kv, needs[0].tp, fits=fits)
        heads = next((h for h in options if h.strategy == way), None)
        if heads is None:
            return {}
        spreads[q_name], spreads[kv_name] = heads.q, heads.kv
    return spreads


def _cached_in(model: Model, suffix: str, heads: ways.Heads, tp: int) -> set[int]:
    """Bytes that a rank caches per token in the layers with these heads."""
    spreads = {"q_heads": heads.q, "kv_heads": heads.kv}
    headed = {tag: text for tag, text in model.kv_entries.items() if "kv_heads" in text}
    found = cached_by_kind(model, spreads, tp, headed)
    return {size for tags, size in found.items() if model.suffix_in(model.kinds[tags][0]) == suffix}
