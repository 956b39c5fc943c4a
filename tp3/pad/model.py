"""What a planner needs to know of a model: its axes, its layers, and a rule for every tensor.

A family's reader (``families``) makes one from a config. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

Tags = frozenset[str]


@dataclass(frozen=True)
class HeadAxes:
    """Query heads that share KV heads. ``suffix`` tells geometries apart (".sliding")."""

    q: int
    kv: int
    head_dim: int
    suffix: str = ""
    layers: int = 1

    @property
    def names(self) -> tuple[str, str]:
        return f"q_heads{self.suffix}", f"kv_heads{self.suffix}"


@dataclass(frozen=True)
class Units:
    """Whole units that are appended: MLA heads, linear key heads, Mamba groups, vision heads.

    tied: other axes by how many of their units belong to one of these (value heads to key heads).
    """

    name: str
    count: int
    tied: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Width:
    """Single columns: ``intermediate``, ``moe_intermediate``, ``shared_intermediate``.

    tied: other widths by how many of their columns belong to one of these, where a config has one
    number for both (shared experts to one expert).
    """

    name: str
    count: int
    tied: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Vocabulary:
    """Tokens; engines round them to 64."""

    name: str
    count: int


Axis = HeadAxes | Units | Width | Vocabulary


@dataclass(frozen=True)
class Rule:
    """The tensors of a name: the extent of each dimension, and why zeros are right there.

    pattern: ``*`` stands for the layer number, ``#`` for an expert's, a last ``**`` for any names
    of any shape (no dims); other digits are meant (``mtp.layers.0.``). dims: extents (``extent``).
    when: tags that the layer (or, without ``*``, the model) must have, those with "!" must not.
    fill: what a padded entry is. correction: a named change of what was trained (``corrections``).
    spare: may be there unasked. plain: never quantised. instead: the pattern of a required rule
    whose tensors need not be there when all of those that name it here are (in the same layer).
    """

    pattern: str
    dims: tuple[str, ...]
    zero: str = ""
    when: tuple[str, ...] = ()
    fill: float = 0.0
    correction: str = ""
    spare: bool = False
    plain: bool = False
    instead: str = ""

    def applies(self, tags: Tags) -> bool:
        return all((tag[1:] not in tags) if tag[0] == "!" else tag in tags for tag in self.when)


@dataclass(frozen=True)
class Model:
    """A model as its config describes it.

    sizes: every number that an extent may name. layers: for each layer its tags. tags: of the
    model. experts: how many ``#`` stands for. sizes_by_tag: sizes that differ in layers with a tag
    (``{"sliding": {"head_dim": 64}}``); axes that do have a suffix instead: in a layer with tag
    ``sliding`` the name ``q_heads`` means ``q_heads.sliding`` where there is one.
    paths: for each axis the places in the config that say its size. pins: values that must stand in
    the padded config because engines would derive them from a padded size.
    lengths: places in the config that say an extent, such as heads times head_dim, or an extent by
    a size (``mamba_heads*mamba_head_dim / hidden``).
    kv_entries: what a token's cache holds in a layer with a tag, in entries, as an extent.
    """

    model_type: str
    axes: tuple[Axis, ...]
    sizes: Mapping[str, int]
    layers: tuple[Tags, ...]
    rules: tuple[Rule, ...]
    paths: Mapping[str, tuple[str, ...]]
    tags: Tags = frozenset()
    experts: int = 0
    sizes_by_tag: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    pins: Mapping[str, Any] = field(default_factory=dict)
    lengths: Mapping[str, str] = field(default_factory=dict)
    kv_entries: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @cached_property
    def kinds(self) -> Mapping[Tags, tuple[int, ...]]:
        """The layers by their tags: those of one kind have the same sizes and rules."""
        found: dict[Tags, list[int]] = {}
        for number, tags in enumerate(self.layers):
            found.setdefault(tags, []).append(number)
        return {tags: tuple(numbers) for tags, numbers in found.items()}

    def kinds_with(self, rule: Rule) -> Iterator[tuple[int | None, ...]]:
        """The layers that have a tensor of this rule, kind by kind; (None,) for one outside of the
        layers.
        """
        if "*" not in rule.pattern:
            if rule.applies(self.tags):
                yield (None,)
            return
        for tags, numbers in self.kinds.items():
            if rule.applies(tags | self.tags):
                yield numbers

    def places(self, rule: Rule) -> Iterator[int | None]:
        """The layers that have a tensor of this rule; None once for one outside of the layers."""
        kinds = list(self.kinds_with(rule))
        if len(kinds) == 1:
            yield from kinds[0]
        else:
            yield from sorted(number for kind in kinds for number in kind if number is not None)

    def sizes_in(self, layer: int | None) -> Mapping[str, int]:
        """Sizes as they are in a layer."""
        if layer is None or not self.sizes_by_tag:
            return self.sizes
        found = dict(self.sizes)
        for tag in self.layers[layer]:
            found.update(self.sizes_by_tag.get(tag, {}))
        return found

    def suffix_in(self, layer: int | None) -> str:
        """The suffix of the head axes that a layer uses."""
        if layer is None:
            return ""
        suffixes = {axis.suffix for axis in self.axes if isinstance(axis, HeadAxes) and axis.suffix}
        return next((s for s in sorted(suffixes) if s[1:] in self.layers[layer]), "")
