"""What limits a plan's sizes: quantisation blocks that no rank may cut, norms over a width that is
cut, and wishes. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd, lcm

from tp3.pad.extent import sections
from tp3.pad.formats import Format
from tp3.pad.model import Axis, HeadAxes, Model, Rule, Units, Width
from tp3.pad.spread import Spread


class Needs:
    """What a rank's share of each axis must divide by: from the format, and asked for.

    alignment: what an engine's kernels want of a format beside that (``Format.blocks``).
    """

    def __init__(
        self,
        model: Model,
        form: Format,
        tp: int,
        asked: Mapping[str, int],
        alignment: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        self.tp = tp
        self.asked = asked
        self.names = {name for axis in model.axes for name in names_of(axis)}
        self._hard: dict[str, int] = dict.fromkeys(self.names, 1)
        self._normed = {name for rule in model.rules if rule.correction for name in rule.dims}
        for rule in model.rules:
            if rule.plain:
                continue
            places = tuple(model.places(rule))
            blocks = form.blocks(rule, places, alignment)
            if not any(block > 1 for block in blocks):
                continue
            # Layers of one kind have the same sizes: one of each is enough.
            for place in {model.layers[n] if n is not None else None: n for n in places}.values():
                self._collect(model, rule, blocks, place)

    def _collect(
        self, model: Model, rule: Rule, blocks: tuple[int, ...], layer: int | None
    ) -> None:
        counted = dict.fromkeys(self.names)
        sizes, suffix = model.sizes_in(layer), model.suffix_in(layer)
        for dim, block in zip(rule.dims, blocks, strict=True):
            for part in sections(dim, sizes, counted):
                if part.axis is not None and block > 1:
                    name = part.axis + suffix if part.axis + suffix in self.names else part.axis
                    whole = block // gcd(block, part.unit)
                    self._hard[name] = lcm(self._hard[name], whole)

    def share(self, name: str) -> int:
        """Units that a rank's share must be a multiple of."""
        return lcm(self._hard[name], self.asked.get(name, 1))

    def fits(self, name: str, padded: int) -> bool:
        return padded % self.tp == 0 and (padded // self.tp) % self.share(name) == 0

    def parted(self, name: str, padded: int) -> bool:
        """Whether ranks have heads of their own, where a norm runs over all of them: an engine that
        gives one KV head to several ranks cuts the norm's weight at other places.
        """
        normed = any(name in extent.split("*") for extent in self._normed)
        return padded % self.tp == 0 or not normed

    def whole(self, name: str, spread: Spread) -> bool:
        """Whether no quantisation block holds entries of two runs."""
        return spread.in_blocks(self._hard[name]) is not None


def names_of(axis: Axis) -> tuple[str, ...]:
    """The names of an axis and of those tied to it."""
    if isinstance(axis, HeadAxes):
        return axis.names
    if isinstance(axis, Units | Width):
        return axis.name, *axis.tied
    return (axis.name,)
