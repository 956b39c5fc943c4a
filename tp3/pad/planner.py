"""`plan(config, tp=3)`: the sizes at which every rank gets a whole share of a model. No torch.

A plan is inert when nothing needs padding. The padded config pins `head_dim`, which engines
otherwise derive from hidden_size / num_attention_heads and so get wrong, and keeps the original
sizes under the key `tp3`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tp3.pad import geometry
from tp3.pad.shape import Shape

CONFIG_KEYS = {
    "q_heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "intermediate": "intermediate_size",
    "vocab": "vocab_size",
}


@dataclass(frozen=True)
class Axis:
    """One planned size: as trained, as padded, per rank, and why."""

    name: str
    stock: int
    padded: int
    per_rank: int
    reason: str

    def __post_init__(self) -> None:
        assert self.padded >= self.stock, f"{self.name} would shrink"
        assert self.padded % self.per_rank == 0, f"{self.name} would not divide"


@dataclass(frozen=True)
class Plan:
    """The sizes of one model at one tensor-parallel size."""

    shape: Shape
    tp: int
    strategy: str
    axes: tuple[Axis, ...]

    @property
    def inert(self) -> bool:
        return all(axis.padded == axis.stock for axis in self.axes)

    @property
    def padded_sizes(self) -> dict[str, int]:
        return {axis.name: axis.padded for axis in self.axes}

    def padded_config(self, config: Mapping[str, object]) -> dict[str, object]:
        """A copy of `config` that fits the padded weights; unchanged when the plan is inert."""
        padded = dict(config)
        if self.inert:
            return padded
        for axis in self.axes:
            padded[CONFIG_KEYS[axis.name]] = axis.padded
        padded["head_dim"] = self.shape.head_dim
        padded["tp3"] = {
            "tp": self.tp,
            "strategy": self.strategy,
            "stock": {CONFIG_KEYS[axis.name]: axis.stock for axis in self.axes},
        }
        return padded


def plan(config: Mapping[str, object], *, tp: int = 3) -> Plan:
    """The smallest padding of the model that `config` describes at `tp` ranks."""
    if not isinstance(tp, int) or isinstance(tp, bool) or tp < 1:
        raise ValueError(f"tp must be a positive integer, got {tp!r}")
    shape = Shape.from_config(config)
    heads = geometry.append_heads(shape.q_heads, shape.kv_heads, tp=tp)
    width = geometry.pad_width(shape.intermediate, tp=tp)
    vocab = geometry.pad_vocab(shape.vocab, tp=tp)
    return Plan(
        shape=shape,
        tp=tp,
        strategy="append",
        axes=(
            Axis(
                "q_heads",
                shape.q_heads,
                heads.q,
                heads.q // tp,
                f"{heads.kv} KV groups of {heads.ratio}",
            ),
            _axis("kv_heads", shape.kv_heads, heads.kv, tp, f"multiple of {tp}"),
            _axis("intermediate", shape.intermediate, width, tp, f"multiple of {tp}"),
            _axis("vocab", shape.vocab, vocab, tp, f"multiple of lcm(64, {tp})"),
        ),
    )


def _axis(name: str, stock: int, padded: int, tp: int, rule: str) -> Axis:
    reason = f"already a {rule}" if padded == stock else f"smallest {rule}"
    return Axis(name, stock, padded, padded // tp, reason)
