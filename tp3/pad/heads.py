"""The exact ways to pad grouped query heads. No torch.

Symbols: q query heads share kv KV heads; ratio g = q / kv; query head h reads KV head h // g. The
map is part of the trained weights: in every padded form query head i reads a copy of the KV head
that its source read.

* ``append``: whole KV groups of zeros at the end.
* ``in-group``: each KV head c times, its query heads dealt out over the copies, zeros where they do
  not fill one, then KV heads of zeros. 16/2 on six ranks: 18/6; on five: 20/5.
* ``split-group``: each KV head r times for an r that divides g; no zeros among the query heads.
  24/4 on three ranks: 24/12.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tp3.pad.spread import Spread, appended, joined, kept, picked

STRATEGIES = ("append", "in-group", "split-group")


@dataclass(frozen=True)
class Heads:
    """One way to pad: where the padded query and KV heads come from."""

    strategy: str
    q: Spread
    kv: Spread

    def __post_init__(self) -> None:
        if self.q.padded % self.kv.padded:
            raise ValueError(
                f"query heads must be a positive multiple of KV heads, got {self.q.padded} and "
                f"{self.kv.padded}"
            )
        stock_ratio, ratio = self.q.stock // self.kv.stock, self.q.padded // self.kv.padded
        kv_sources = self.kv.sources
        for head, source in enumerate(self.q.sources):
            if source is not None:
                assert kv_sources[head // ratio] == source // stock_ratio, "the map would break"

    @property
    def ratio(self) -> int:
        return self.q.padded // self.kv.padded

    @property
    def inert(self) -> bool:
        return self.q.inert and self.kv.inert

    def kv_per_rank(self, tp: int) -> int:
        """KV heads that a rank holds; an engine gives each rank one when there are fewer."""
        return max(self.kv.padded // tp, 1)


def serves(q: int, kv: int, tp: int) -> bool:
    """Whether an engine takes these heads: both divide, or whole ranks share a KV head."""
    return q % tp == 0 and (kv % tp == 0 or tp % kv == 0)


def candidates(
    q: int, kv: int, tp: int, *, fits: Callable[[Heads], bool] = lambda heads: True
) -> Iterator[Heads]:
    """For each strategy the smallest padding that an engine takes and that ``fits``; where several
    cache no more than ``append``, the smallest of those.
    """
    if q < 1 or kv < 1 or q % kv:
        raise ValueError(f"query heads must be a positive multiple of KV heads, got {q} and {kv}")
    cached = 0
    for strategy in STRATEGIES:
        found = next((h for h in _WAYS[strategy](q, kv, tp, cached) if fits(h)), None)
        if found is not None:
            cached = cached or found.kv_per_rank(tp)
            yield found


def _append(q: int, kv: int, tp: int, cached: int) -> Iterator[Heads]:
    ratio = q // kv
    for padded in range(kv, _most(kv, tp) + 1):
        if serves(padded * ratio, padded, tp):
            yield Heads("append", appended(q, padded * ratio), appended(kv, padded))


def _in_group(q: int, kv: int, tp: int, cached: int) -> Iterator[Heads]:
    """For each number of query heads to a copy (``local``) as few copies as hold them all. First
    those with at most ``cached`` KV heads on a rank, each time fewest query heads first.
    """
    ratio = q // kv
    found = []
    for local in range(1, ratio):
        copies = -(-ratio // local)
        for padded in range(kv * copies, max(kv * copies + tp, cached * tp + 1)):
            if serves(padded * local, padded, tp):
                dear = max(padded // tp, 1) > cached
                found.append((dear, padded * local, padded, local, copies))
    for _, _, padded, local, copies in sorted(found):
        dealt = joined(_dealt(ratio, copies, local) for _ in range(kv))
        dummies = padded - kv * copies
        q_spread = dealt if not dummies else _extended(dealt, dummies * local)
        sources = [head for head in range(kv) for _ in range(copies)]
        yield Heads("in-group", q_spread, picked(kv, [*sources, *[None] * dummies]))


def _split_group(q: int, kv: int, tp: int, cached: int) -> Iterator[Heads]:
    ratio = q // kv
    for copies in range(2, ratio + 1):
        if ratio % copies == 0 and serves(q, kv * copies, tp):
            sources = [head for head in range(kv) for _ in range(copies)]
            yield Heads("split-group", kept(q), picked(kv, sources))


def _dealt(ratio: int, copies: int, local: int) -> Spread:
    """The query heads of one group over its copies, ``local`` places each."""
    sources: list[int | None] = []
    for copy in range(copies):
        mine = range(copy * local, min((copy + 1) * local, ratio))
        sources += [*mine, *[None] * (local - len(mine))]
    return picked(ratio, sources)


def _extended(spread: Spread, zeros: int) -> Spread:
    return Spread(spread.stock, (*spread.runs, (None, zeros)))


def _most(kv: int, tp: int) -> int:
    """Where to stop looking: room for any constraint that a kernel may put on local heads."""
    return kv + 64 * tp


_WAYS: dict[str, Callable[[int, int, int, int], Iterator[Heads]]] = {
    "append": _append,
    "in-group": _in_group,
    "split-group": _split_group,
}
