"""`padded_weights` wraps a stream of `(name, tensor)` and widens one tensor at a time.

A tensor that needs nothing is handed on as the same object. Coverage is proven: a tensor without a
rule, a shape that is not the config's, and at the end of the stream a tensor that never came are
each a ValueError naming it; `strict=False` makes them warnings and hands such tensors on
untouched. An inert plan returns the caller's own stream.
"""

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from torch import Tensor

from tp3.pad.planner import Plan
from tp3.pad.rules import LLAMA_RULES, Rule, find_rule, sizes_of


@dataclass
class Tally:
    """What went through the stream: for each rule the names seen, in the checkpoint's own order."""

    seen: dict[Rule, set[str]] = field(default_factory=dict)

    def add(self, rule: Rule, name: str) -> bool:
        """Counts the tensor; False if it was there before."""
        names = self.seen.setdefault(rule, set())
        new = name not in names
        names.add(name)
        return new

    def lines(self, plan: Plan) -> list[str]:
        """A line per padded rule, such as `self_attn.q_proj.weight 16 × [12288 → 18432]`."""
        stock = sizes_of(plan.shape)
        padded = stock | plan.padded_sizes
        lines = []
        for rule, names in self.seen.items():
            before, after = (rule.tensor_shape(sizes)[rule.dim] for sizes in (stock, padded))
            if before != after:
                lines.append(f"{_short(rule)} {len(names)} × [{before} → {after}]")
        return lines


def padded_weights(
    weights: Iterable[tuple[str, Tensor]],
    plan: Plan,
    *,
    strict: bool = True,
    tally: Tally | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """The same stream in the same order, padded as `plan` says; `tally` is filled on the way."""
    if plan.inert:
        return iter(weights)
    return _stream(weights, plan, strict, tally if tally is not None else Tally())


def _stream(
    weights: Iterable[tuple[str, Tensor]], plan: Plan, strict: bool, tally: Tally
) -> Iterator[tuple[str, Tensor]]:
    stock = sizes_of(plan.shape)
    padded = stock | plan.padded_sizes
    for name, tensor in weights:
        rule = find_rule(name, plan.shape)
        if rule is None:
            _reject(f"tensor {name} is not part of a {_describe(plan)}", strict)
        elif not tally.add(rule, name):
            _reject(f"tensor {name} came twice", strict)
        elif tuple(tensor.shape) != rule.tensor_shape(stock):
            got, expected = list(tensor.shape), list(rule.tensor_shape(stock))
            _reject(f"tensor {name} has shape {got}, expected {expected}", strict)
        else:
            tensor = _widen(tensor, rule.tensor_shape(padded))
        yield name, tensor
    for rule in LLAMA_RULES:
        got_count, expected_count = len(tally.seen.get(rule, ())), rule.least(plan.shape)
        if got_count < expected_count:
            missing = _first_missing(rule, tally, expected_count)
            _reject(
                f"tensor {missing} is missing: {got_count} of {expected_count} {_short(rule)} came",
                strict,
            )


def _widen(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    if tuple(tensor.shape) == shape:
        return tensor
    wide = tensor.new_zeros(shape)
    wide[tuple(slice(size) for size in tensor.shape)] = tensor
    return wide


def _reject(sentence: str, strict: bool) -> None:
    if strict:
        raise ValueError(sentence)
    warnings.warn(sentence, stacklevel=3)


def _first_missing(rule: Rule, tally: Tally, count: int) -> str:
    names = (rule.pattern.replace("*", str(layer)) for layer in range(count))
    return next(name for name in names if name not in tally.seen.get(rule, ()))


def _describe(plan: Plan) -> str:
    return f"{plan.shape.model_type} model of {plan.shape.layers} layers"


def _short(rule: Rule) -> str:
    return rule.pattern.rpartition("*.")[2]
