"""Names of tensors and the rules they may belong to. No torch.

A pattern's ``*`` is the number of a layer, ``#`` of an expert; other numbers are meant. Patterns
are looked up with every number as 0.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import NamedTuple

from tp3.pad.companions import CACHE, PRIMARY, SUFFIXES
from tp3.pad.model import Rule

NUMBERS = re.compile(r"\.(\d+)(?![^.])")  # split by it, every second piece is a number


class Key(NamedTuple):
    """A rule's tensor or, with a suffix, one of its companions."""

    rule: Rule
    suffix: str
    base: str
    parts: tuple[str, ...]


class At(NamedTuple):
    layer: int | None
    expert: int | None


def keys_of(rule: Rule) -> Iterator[Key]:
    """The names a rule may go by: its own, and those of a quantised weight's companions."""
    base = rule.pattern
    for end in (".weight", "_blocks"):
        base = base.removesuffix(end)
    parts = tuple(part for part in base.split(".") if part in "*#" or part.isdigit())
    yield Key(rule, "blocks" if rule.pattern.endswith("_blocks") else "", base, parts)
    module, _, last = base.rpartition(".")
    if rule.pattern.endswith(".weight") and last in ("k_proj", "v_proj", "kv_b_proj"):
        yield from (Key(rule, suffix, base, parts) for suffix in CACHE)
        if last != "v_proj":  # the cache's scales may also be the attention's own
            yield from (Key(rule, suffix, module, parts) for suffix in CACHE)
    if len(rule.dims) < 2 or rule.plain:
        return
    for suffix in SUFFIXES:
        if not (suffix == "weight" and rule.pattern.endswith(".weight")):
            yield Key(rule, suffix, base, parts)


def names_of(rule: Rule) -> list[str]:
    """The patterns of what a file must have for a rule's tensor, one of them."""
    return [_full(key) for key in keys_of(rule) if not key.suffix or key.suffix in PRIMARY]


def _full(key: Key) -> str:
    """The pattern of a key."""
    if not key.suffix:
        return key.rule.pattern
    if key.rule.pattern.endswith(".weight"):
        return f"{key.base}.{key.suffix}"
    return f"{key.base}_{key.suffix}"


def wild(key: Key) -> str:
    return ".".join(
        "0" if part in ("*", "#") or part.isdigit() else part for part in _full(key).split(".")
    )


def match(parts: tuple[str, ...], numbers: list[str]) -> At | None:
    layer = expert = None
    for part, number in zip(parts, numbers):
        if part == "*":
            layer = int(number)
        elif part == "#":
            expert = int(number)
        elif part != number:
            return None
    return At(layer, expert)


def filled(pattern: str, at: At) -> str:
    return pattern.replace("*", str(at.layer)).replace("#", str(at.expert))


def companions_of(module: str, suffixes: tuple[str, ...], have: Collection[str]) -> list[str]:
    """The names by which one of a module's companions may go, the likeliest first."""
    if f"{module}_blocks" in have:
        return [f"{module}_{suffix}" for suffix in sorted(suffixes, key=lambda s: s != "scales")]
    if module in have:
        return [f"{module}_{suffix}" for suffix in suffixes]
    return [f"{module}.{suffix}" for suffix in suffixes]


def short(name: str) -> str:
    """A name without what numbers it."""
    rest = NUMBERS.split(f".{name}")[-1]
    return rest.lstrip(".") or name
