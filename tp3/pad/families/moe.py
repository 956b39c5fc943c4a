"""Rules of routed experts, one tensor each or all in one; a layer's router beside them.

Sizes they name: experts, hidden. Axis: moe_intermediate, or the width that is given.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from tp3.pad.families import llama
from tp3.pad.families.config import Config
from tp3.pad.model import Rule

GATE = ("gate.weight", ("experts", "hidden"))
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def experts(
    at: str, names: tuple[str, str, str] = PROJECTIONS, width: str = "moe_intermediate"
) -> tuple[Rule, ...]:
    """Every expert's gate, up and down projection; ``at`` ends in ``experts.``."""
    gate, up, down = names
    return (
        Rule(f"{at}#.{gate}.weight", (width, "hidden"), llama.NO_GATE),
        Rule(f"{at}#.{up}.weight", (width, "hidden"), llama.NO_UP),
        Rule(f"{at}#.{down}.weight", ("hidden", width), llama.NO_WIDTH),
    )


def fused_experts(
    at: str, width: str = "moe_intermediate", *, transposed: bool = False
) -> tuple[Rule, ...]:
    """All experts in two tensors, gate above up: [E, 2I, H] and [E, H, I], or each transposed."""
    both = f"{width} + {width}"
    gate_up, down = (both, "hidden"), ("hidden", width)
    if transposed:
        gate_up, down = gate_up[::-1], down[::-1]
    return (
        Rule(at + "gate_up_proj", ("experts", *gate_up), llama.NO_GATE),
        Rule(at + "down_proj", ("experts", *down), llama.NO_WIDTH),
    )


def either(fused: Iterable[Rule], single: Iterable[Rule]) -> tuple[Rule, ...]:
    """Fused experts, or in their place one tensor each: gate and up for the first, down for the
    second. Savers differ.
    """
    first, second = fused
    gate, up, down = (replace(rule, spare=True) for rule in single)
    return (
        first,
        second,
        replace(gate, instead=first.pattern),
        replace(up, instead=first.pattern),
        replace(down, instead=second.pattern),
    )


def number_of_experts(config: Config, key: str = "num_experts") -> int:
    """Transformers 5 writes ``num_local_experts`` where the Hub's configs have another key."""
    other = "num_local_experts"
    return config.size(other if config.has(other) and not config.has(key) else key)


def router(at: str, tensors: Iterable[tuple[str, tuple[str, ...]]] = (GATE,)) -> tuple[Rule, ...]:
    """What chooses experts: nothing that a plan changes, and never quantised."""
    return tuple(Rule(at + name, dims, plain=True) for name, dims in tensors)
