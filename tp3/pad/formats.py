"""How a checkpoint stores its weights: what shares a scale, what a rank needs whole. No torch.

Symbols: a linear weight is [N, K]; ``rows`` entries of N and ``columns`` of K share a scale, 0
stands for the whole dimension. Alignment per rank: ../docs/padding.md has the table.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import translate
from functools import cached_property
from math import lcm
from typing import Any

from tp3.pad.model import Rule

# Entries of N and of K that a rank's kernels want whole, beside what shares a scale. Integer
# formats run on Marlin; fp8 on matrix units that take 16 columns at a time.
ALIGNMENT = {
    "plain": (1, 1),
    "fp8": (1, 16),
    "int8": (1, 16),
    "mxfp8": (1, 32),
    "mxfp4": (1, 32),
    "nvfp4": (1, 16),
    "gptq": (64, 128),
    "awq": (64, 128),
    "packed": (64, 128),
}
# What in a module's name may depend on numbers: a number, a character of a set, an expression.
LAYER_NUMBER = re.compile(r"[0-9?\[]|^re:")


@dataclass(frozen=True)
class Format:
    """bits: of a weight with its scales. ignored: modules that stay plain, targets: modules that
    are stored so (empty: every linear); names with wildcards or ``re:``. parts: formats of some
    modules, which their targets name. code: bits of a packed integer.
    zero_offset: what a stored zero point is less than the code it stands for. symmetric: every zero
    point is the middle code. act_order: columns are grouped in another order than they lie in.
    """

    name: str
    rows: int = 1
    columns: int = 1
    bits: float = 16
    ignored: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    parts: tuple[Format, ...] = ()
    code: int = 4
    zero_offset: int = 0
    symmetric: bool = True
    act_order: bool = False

    def of(self, module: str) -> Format:
        """The format of a module by its name in the checkpoint."""
        for part in self.parts:
            if part._targets.match(module):
                return part
        if self.name == "plain" or self._ignored.match(module):
            return PLAIN
        return self if not self.targets or self._targets.match(module) else PLAIN

    def among(self, rule: Rule, layers: Sequence[int | None] = (None,)) -> tuple[Format, ...]:
        """The formats, plain or not, that a rule's tensors in ``layers`` are stored in."""
        if rule.plain or len(rule.dims) < 2:
            return (PLAIN,)
        module = rule.pattern.removesuffix(".weight").removesuffix("_blocks")
        layers = layers if self.tells_layers_apart else layers[:1]
        # by identity first: to hash a format is to hash its lists of names
        found = {id(form): form for form in (self._at(module, layer) for layer in layers)}
        return tuple(dict.fromkeys(found.values())) or (PLAIN,)

    def quantises(self, rule: Rule, layers: Sequence[int | None] = (None,)) -> bool:
        """Whether such tensors are stored in this format or in one of its parts."""
        return any(form.name != "plain" for form in self.among(rule, layers))

    def bits_of(self, rule: Rule, layer: int | None = None) -> float:
        """Bits of a weight."""
        return self.among(rule, (layer,))[0].bits

    def blocks(
        self,
        rule: Rule,
        layers: Sequence[int | None] = (None,),
        alignment: Mapping[str, tuple[int, int]] | None = None,
    ) -> tuple[int, ...]:
        """For each dimension of such tensors the block that must not be cut. alignment: what an
        engine's kernels want of N and K beside ``ALIGNMENT``, by format.
        """
        if not self.quantises(rule, layers):
            return (1,) * len(rule.dims)
        rows = columns = 1
        for form in self.among(rule, layers):
            row, column = ALIGNMENT[form.name]
            more_rows, more_columns = (alignment or {}).get(form.name, (1, 1))
            rows = lcm(rows, row, more_rows, form.rows or 1)
            columns = lcm(columns, column, more_columns, form.columns or 1)
        last = (columns, rows) if transposed(rule) else (rows, columns)
        return (*(1,) * (len(rule.dims) - 2), *last)

    @cached_property
    def tells_layers_apart(self) -> bool:
        """Whether a module's format may depend on the number of its layer."""
        lists = (self.ignored, self.targets, *(part.targets for part in self.parts))
        return any(LAYER_NUMBER.search(name) for names in lists for name in names)

    @cached_property
    def _ignored(self) -> Names:
        return Names(self.ignored)

    @cached_property
    def _targets(self) -> Names:
        return Names(self.targets)

    @cached_property
    def _known(self) -> dict[tuple[str, int | None], Format]:
        return {}

    def _at(self, module: str, layer: int | None) -> Format:
        """The format of a module's pattern in a layer."""
        key = module, layer if "*" in module else None
        if key not in self._known:
            name = module.replace("*", str(layer or 0)).replace("#", "0")
            self._known[key] = self.of(name)
        return self._known[key]


PLAIN = Format("plain")


class Names:
    """Patterns of modules. A plain one names a module, its children, and it under any parent; ``*``
    is any text; ``re:`` begins a regular expression, matched from the start.
    """

    def __init__(self, patterns: tuple[str, ...]) -> None:
        self.exact = {p for p in patterns if not p.startswith("re:") and not set(p) & set("*?[")}
        texts = []
        for pattern in patterns:
            if pattern.startswith("re:"):
                texts.append(pattern[3:])
            elif pattern not in self.exact:
                ends = translate(pattern), translate(pattern + ".*")
                texts += [text for end in ends for text in (end, r"(?:.*\.)" + end)]
        self.texts = re.compile("|".join(f"(?:{text})" for text in texts)) if texts else None

    def match(self, module: str) -> bool:
        return self._names(module) or bool(self.texts and self.texts.match(module))

    def _names(self, module: str) -> bool:
        return any(path in self.exact for path in _paths(module)) if self.exact else False


def _paths(module: str) -> Iterator[str]:
    """Every run of a name's segments."""
    segments = module.split(".")
    for first in range(len(segments)):
        for last in range(first + 1, len(segments) + 1):
            yield ".".join(segments[first:last])


def transposed(rule: Rule) -> bool:
    """Whether stacked experts lie as [E, K, N]; their down projection is the one to ``hidden``."""
    if len(rule.dims) != 3:
        return False
    return rule.dims[-1 if "down" in rule.pattern else -2] == "hidden"


def read_format(
    config: Mapping[str, Any], hf_quant_config: Mapping[str, Any] | None = None
) -> Format:
    """The format that a config names; ``plain`` without one. ``hf_quant_config``: what ModelOpt
    puts in a file of that name. Errors: ValueError says why a format cannot be padded.
    """
    from tp3.pad.quantisation import understood

    try:
        found = understood(config, hf_quant_config)
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError(f"quantization_config is malformed: {error!r}") from error
    return found or PLAIN
