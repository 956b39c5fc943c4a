"""Changes of what was trained, where zeros alone would change the function. No torch.

``rms_width``: RMSNorm over a whole padded width N → N' divides by N' what it summed over N. The
weight times f = sqrt(N / N') and eps times f² give back the trained norm exactly: f² (s / N + eps)
is s / N' + eps f². Where every trained unit is copied m times, s is m times as large and so is f².
Source: the algebra; checked against fp64 in the tests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import sqrt

from tp3.pad.extent import spread_of
from tp3.pad.model import Model
from tp3.pad.spread import Spread

NAMES = ("", "rms_width")


def eps_factor(correction: str, spread: Spread) -> float:
    """What eps is multiplied by. Errors: ValueError where copies are not even."""
    assert correction in NAMES, correction
    if not correction or spread.inert:
        return 1.0
    copies = _copies(spread)
    if copies is None:
        raise ValueError(
            f"a norm over {spread.stock} entries cannot follow uneven copies of them; "
            "use the strategy append"
        )
    return copies * spread.stock / spread.padded


def weight_factor(correction: str, spread: Spread) -> float:
    """What the trained weight is multiplied by."""
    return sqrt(eps_factor(correction, spread))


def eps_factors(model: Model, spreads: Mapping[str, Spread]) -> dict[str, float]:
    """For each corrected norm, by its module's pattern, the factor of its eps; a host applies it,
    because the config has one eps for these norms and for those that no plan widens.
    """
    factors = {}
    for rule in model.rules:
        if rule.correction:
            places = list(model.places(rule))
            if not places:
                continue
            place = places[0]
            suffix = model.suffix_in(place)
            here = {name: spreads.get(name + suffix, spread) for name, spread in spreads.items()}
            spread = spread_of(rule.dims[-1], model.sizes_in(place), here)
            factor = eps_factor(rule.correction, spread)
            if factor != 1.0:
                factors[rule.pattern.removesuffix(".weight")] = factor
    return factors


def _copies(spread: Spread) -> int | None:
    """How often each trained unit is there, if all alike."""
    edges: Counter[int] = Counter()
    for first, count in spread.runs:
        if first is not None:
            edges[first] += 1
            edges[first + count] -= 1
    level, at = 0, 0
    levels = set()
    for edge in sorted(edges):
        if edge > at:
            levels.add(level)
        level, at = level + edges[edge], edge
    whole = at == spread.stock and len(levels) == 1 and 0 not in levels
    return levels.pop() if whole else None
