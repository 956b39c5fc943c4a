"""Which of several plans is taken, and what is said of the others. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from tp3.pad.model import HeadAxes, Model

if TYPE_CHECKING:
    from tp3.pad.planner import Plan


def choose(plans: list[Plan]) -> Plan:
    """Append's cache is the limit, layer by layer, since sliding layers forget and full ones do
    not; then fewest bytes; of equals the first way.
    """
    limit = next((p for p in plans if p.strategy == "append"), plans[0])
    dearer = {id(p): _dearer(p, limit) for p in plans}
    best = min((p for p in plans if not dearer[id(p)]), key=lambda p: p.ledger.weight_bytes)
    rejected = []
    for other in plans:
        if other is best:
            continue
        more = other.ledger.weight_bytes - best.ledger.weight_bytes
        text = f"{more} more bytes of weights per rank" if more else "no fewer bytes"
        rejected.append(f"{other.strategy} {_heads_text(other)}: {dearer[id(other)] or text}")
    return replace(best, rejected=tuple(rejected))


def _dearer(plan: Plan, limit: Plan) -> str:
    """Where a plan caches more than another, in words."""
    allowed = limit.kv_bytes_per_layer
    for layer, size in plan.kv_bytes_per_layer.items():
        if size > allowed[layer]:
            return (
                f"caches {size} bytes per token in layer {layer}, {limit.strategy} {allowed[layer]}"
            )
    return ""


def query_axes(model: Model) -> list[str]:
    return [axis.names[0] for axis in model.axes if isinstance(axis, HeadAxes)]


def _heads_text(plan: Plan) -> str:
    sizes = plan.padded_sizes
    return ", ".join(
        "/".join(str(sizes[name]) for name in axis.names)
        for axis in plan.model.axes
        if isinstance(axis, HeadAxes)
    )


def nothing_serves(
    model: Model, sizes: tuple[int, ...], strategy: str, kv_bytes: int | None, layer: int | None
) -> str:
    heads = " and ".join(
        f"{axis.q}/{axis.kv} heads" for axis in model.axes if isinstance(axis, HeadAxes)
    )
    way = "no strategy" if strategy == "auto" else strategy
    limit = "" if kv_bytes is None else f" with {kv_bytes} bytes of cache per token"
    if layer is not None:
        limit += f" with {layer} bytes of cache per token and layer"
    can = "can" if strategy == "auto" else "cannot"
    return f"{way} {can} pad {heads or 'the model'} to {listed(sizes)} ranks{limit}"


def listed(sizes: Iterable[int]) -> str:
    return " and ".join(str(size) for size in sizes)
