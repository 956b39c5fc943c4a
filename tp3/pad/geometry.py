"""The only arithmetic of padding: the smallest sizes that divide by the number of ranks. No torch.

Heads follow the append rule: whole KV groups are added at the end, `kv' = ⌈kv / tp⌉ · tp` and
`q' = kv' · (q / kv)`. The ratio is part of the trained weights: head `h` reads KV head
`h // (q / kv)` before and after.

    append_heads(9, 3, tp=4) == Heads(q=12, kv=4)
"""

from dataclasses import dataclass
from math import lcm

# engines round every vocabulary up to this; a size that ignores it is padded again, unevenly
VOCAB_MULTIPLE = 64


@dataclass(frozen=True)
class Heads:
    """Query heads and the KV heads they share."""

    q: int
    kv: int

    def __post_init__(self) -> None:
        if self.kv < 1 or self.q < 1 or self.q % self.kv:
            raise ValueError(
                f"query heads must be a positive multiple of KV heads, got {self.q} and {self.kv}"
            )

    @property
    def ratio(self) -> int:
        return self.q // self.kv

    @property
    def kv_of_q(self) -> tuple[int, ...]:
        """The KV head that each query head reads."""
        return tuple(head // self.ratio for head in range(self.q))


def append_heads(q: int, kv: int, *, tp: int) -> Heads:
    """Whole KV groups appended until the KV heads divide by `tp`."""
    stock = Heads(q, kv)
    padded_kv = pad_width(kv, tp=tp)
    padded = Heads(padded_kv * stock.ratio, padded_kv)
    assert padded.kv_of_q[:q] == stock.kv_of_q
    return padded


def pad_width(size: int, *, tp: int, local_multiple: int = 1) -> int:
    """The smallest width whose share per rank is whole blocks of `local_multiple`."""
    return _round_up(size, _positive("tp", tp) * _positive("local_multiple", local_multiple))


def pad_vocab(size: int, *, tp: int) -> int:
    """The smallest vocabulary that both the ranks and the engine's own rounding leave alone."""
    return size if tp == 1 else _round_up(size, lcm(VOCAB_MULTIPLE, _positive("tp", tp)))


def _round_up(size: int, multiple: int) -> int:
    return -(-_positive("size", size) // multiple) * multiple


def _positive(name: str, value: int) -> int:
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
    return value
