"""The cheapest counts of grouped query heads, found by trying all. Knows nothing of the planner.

q query heads share kv KV heads, ratio g. A count is taken when every query head can read a copy of
its KV head, every rank gets whole heads, and no block of the format is cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from math import gcd

from tests.pad.brute import CONFIGS, PLAIN, QUANTISED, text_of


@dataclass(frozen=True)
class Heads:
    """A geometry of grouped queries: entries of q (with its gate), k and v, o for a head, and how
    many tensors hold KV heads.
    """

    q: int
    kv: int
    head_dim: int
    query_rows: int
    caches: int
    block: tuple[int, int]
    columns: tuple[int, int]

    def fits(self, q: int, kv: int, tp: int) -> bool:
        """Engine and format: ranks get whole heads or share one, and no block is cut."""
        if q % tp or q % kv or (kv % tp and tp % kv):
            return False
        rows, local_kv = q // tp * self.query_rows, max(kv // tp, 1) * self.head_dim
        uncut = rows % self.block[0] == 0 and local_kv % self.block[0] == 0
        return uncut and q // tp * self.head_dim % self.columns[1] == 0

    def exact(self, q: int, kv: int) -> bool:
        """Whether every query head can read a copy of its KV head: each KV head of the model needs
        so many copies that the q / kv places of each hold its g query heads; and no block of the
        format may hold heads that were not in one block before.
        """
        ratio, places = self.q // self.kv, q // kv
        copies = -(-ratio // places)
        if self.kv * copies > kv:
            return False
        kept = [head for head in range(self.kv) for _ in range(copies)]
        dealt: list[int | None] = []
        for head in range(self.kv):
            mine = range(head * ratio, (head + 1) * ratio)
            dealt += [*mine, *[None] * (copies * places - ratio)]
        rows, columns = self.block[0], self.columns[1]
        return (
            unparted(dealt, q, self.q, rows // gcd(rows, self.query_rows))
            and unparted(dealt, q, self.q, columns // gcd(columns, self.head_dim))
            and unparted(kept, kv, self.kv, rows // gcd(rows, self.head_dim))
        )

    def append(self, tp: int, least: int = 0) -> tuple[int, int]:
        ratio = self.q // self.kv
        sizes = ((kv * ratio, kv) for kv in count(self.kv) if kv * ratio >= least)
        return next(size for size in sizes if self.fits(*size, tp))

    def cost(self, q: int, kv: int, tp: int) -> int:
        """Entries of attention on a rank, by the hidden size."""
        queries = q // tp * (self.query_rows + self.head_dim)
        return queries + max(kv // tp, 1) * self.head_dim * self.caches

    def cheapest(self, q: int, tp: int, cached: int) -> int | None:
        """The least cost with q query heads and at most so many KV heads on a rank."""
        found = [
            self.cost(q, kv, tp)
            for kv in range(1, cached * tp + 1)
            if max(kv // tp, 1) <= cached and self.fits(q, kv, tp) and self.exact(q, kv)
        ]
        return min(found, default=None)


def unparted(sources: list[int | None], padded: int, stock: int, block: int) -> bool:
    """Whether each block of so many heads is zeros, or a trained block and, if that is the last and
    short one, zeros after it.
    """
    filled = [*sources, *[None] * (padded - len(sources))]
    whole = [*range(stock), *[None] * (-stock % block)]
    trained = {tuple(whole[at : at + block]) for at in range(0, len(whole), block)}
    return all(
        tuple(filled[at : at + block]) in {*trained, (None,) * block}
        for at in range(0, padded, block)
    )


def geometries(name: str) -> list[tuple[Heads, int]]:
    """The geometries that share a count of query heads, and how many layers have each."""
    config = text_of(CONFIGS[name])
    quantised = QUANTISED.get(name, {})
    blocks = quantised.get("attention", PLAIN), quantised.get("output", PLAIN)
    q, kv = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // q
    gated = 2 if config["model_type"].startswith("qwen3_5") else 1
    layers = config["num_hidden_layers"]
    if not config["model_type"].startswith("gemma4"):
        return [(Heads(q, kv, head_dim, gated * head_dim, 2, *blocks), 1)]
    wide = config["global_head_dim"]
    full = Heads(q, config["num_global_key_value_heads"], wide, wide, 1, *blocks)
    slides = config["layer_types"].count("sliding_attention")
    return [(Heads(q, kv, head_dim, head_dim, 2, *blocks), slides), (full, layers - slides)]
