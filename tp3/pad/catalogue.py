"""What a plan does to every tensor of a checkpoint, by name, shape and dtype alone. No torch.

A name is looked up by its pattern, layers and experts told by number; a quantised weight's
companions by their suffix, in the format of the module and then in the checkpoint's others, as
lists of ignored modules are seldom exact. Dtypes are safetensors' ("BF16", "F8_E4M3", "U8").
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from tp3.pad.companions import CACHE, NEEDED, SCALE_FILLS, SINGLE
from tp3.pad.corrections import weight_factor
from tp3.pad.extent import spread_of
from tp3.pad.formats import Format
from tp3.pad.model import Rule
from tp3.pad.names import (
    NUMBERS,
    At,
    Key,
    companions_of,
    filled,
    keys_of,
    match,
    names_of,
    short,
    wild,
)
from tp3.pad.planner import Plan
from tp3.pad.spread import Spread, kept
from tp3.pad.storage import Placed, place_cache, place_companion, place_single

PLAIN_DTYPES = frozenset(("F64", "F32", "F16", "BF16", "I64", "I32", "BOOL"))


@dataclass(frozen=True)
class Entry:
    """A tensor of the file. stock, padded: its shape before and after. spreads: of each dimension,
    in the file's own units. fill: a number, or what ``weights`` has a function for. group: entries
    to a group, where the fill is one. factor: of what was trained (``correction``).
    """

    name: str
    rule: Rule
    stock: tuple[int, ...]
    padded: tuple[int, ...]
    spreads: tuple[Spread, ...]
    fill: float | str = 0.0
    correction: str = ""
    factor: float = 1.0
    group: int = 0

    @property
    def inert(self) -> bool:
        """Whether the tensor stays as it is."""
        return self.factor == 1.0 and self.group == 0 and all(s.inert for s in self.spreads)


class Catalogue:
    """The tensors of a plan's model. scale_fill: what stands in scales where nothing was trained;
    a fact of the kernel that reads it (``companions.SCALE_FILLS``).
    """

    def __init__(self, plan: Plan, *, scale_fill: str = "nearest") -> None:
        if scale_fill not in SCALE_FILLS:
            raise ValueError(
                f"scale_fill must be one of {', '.join(SCALE_FILLS)}, got {scale_fill!r}"
            )
        self.plan = plan
        self.scale_fill = scale_fill
        self._seen: dict[str, Entry] = {}
        self._needs: dict[str, Format] = {}  # modules by name that came quantised
        self._placed: dict[object, Placed] = {}
        self._kinds: dict[frozenset[str], int] = {}
        self._applies: dict[tuple[tuple[str, ...], int], bool] = {}
        self._keys: dict[str, list[Key]] = {}
        self._towers: dict[str, Rule] = {}
        for rule in plan.model.rules:
            if rule.pattern.endswith("**"):
                self._towers[rule.pattern.removesuffix("**")] = rule
                continue
            for key in keys_of(rule):
                self._keys.setdefault(wild(key), []).append(key)

    def entry(self, name: str, shape: tuple[int, ...], dtype: str) -> Entry:
        """What happens to a tensor. Errors: ValueError for a name that is no part of the model, a
        shape that is not the config's, a format that cannot be padded there.
        """
        for start, rule in self._towers.items():
            if name.startswith(start):
                whole = tuple(kept(size) for size in shape)
                tower = self._seen[name] = Entry(name, rule, shape, shape, whole)
                return tower
        key, at = self._find(name)
        kind = self._kind(at.layer)
        form = self._format(key, at)
        cached = (key.rule.pattern, key.rule.when, key.suffix, kind, shape, dtype, form.name)
        placed = self._placed.get(cached)
        if placed is None:
            placed = self._placed[cached] = self._place(name, key, at, form, shape, dtype)
        if placed.form is not None:
            self._needs[filled(key.base, at)] = placed.form
        entry = self._seen[name] = Entry(
            name, key.rule, shape, placed.padded, placed.spreads, placed.fill,
            key.rule.correction, placed.factor, placed.group,
        )  # fmt: skip
        return entry

    def weight(self, name: str) -> tuple[Rule, tuple[Spread, ...]]:
        """The rule of a weight, and the spread of each of its dimensions as a plain one. Errors:
        ValueError for a name that is no part of the model.
        """
        key, at = self._find(name)
        return key.rule, self._logical(key.rule, at)

    def missing(self, names: Collection[str]) -> list[str]:
        """Required tensors that are not among the names, in the order of the model; companions of
        those weights that ``entry`` has seen.
        """
        have = names if isinstance(names, (set, frozenset, dict)) else set(names)
        found = []
        for rule in self.plan.model.rules:
            if rule.spare:
                continue
            full = names_of(rule)
            others = [each for each in self.plan.model.rules if each.instead == rule.pattern]
            for at in self._places(rule):
                if any(filled(pattern, at) in have for pattern in full):
                    continue
                if not others or not all(self._is_whole(each, at.layer, have) for each in others):
                    found.append(filled(full[0], at))
        for base, form in self._needs.items():
            for choices in NEEDED[form.name]:
                options = companions_of(base, choices, have)
                if not any(option in have for option in options):
                    found.append(options[0])
        return found

    def _is_whole(self, rule: Rule, layer: int | None, have: Collection[str]) -> bool:
        """Whether a layer has every tensor of a rule."""
        experts = range(self.plan.model.experts) if "#" in rule.pattern else (None,)
        full = names_of(rule)
        return all(
            any(filled(pattern, At(layer, expert)) in have for pattern in full)
            for expert in experts
        )

    def lines(self, names: Collection[str]) -> list[str]:
        """A line for each kind of padded tensor among those names that ``entry`` has seen, such as
        ``self_attn.q_proj.weight 16 × [12288 → 18432]``.
        """
        alike: dict[int, list[Entry]] = {}  # entries of one place share their spreads
        for name in names:
            entry = self._seen.get(name)
            if entry is not None and entry.stock != entry.padded:
                alike.setdefault(id(entry.spreads), []).append(entry)
        counts: dict[tuple[str, tuple[int, ...], tuple[int, ...]], int] = {}
        for first, *others in alike.values():
            line = (short(first.name), first.stock, first.padded)
            counts[line] = counts.get(line, 0) + 1 + len(others)
        return [
            f"{short} {count} × [{_changed(old, new)} → {_changed(new, old)}]"
            for (short, old, new), count in counts.items()
        ]

    def _find(self, name: str) -> tuple[Key, At]:
        pieces = NUMBERS.split(f".{name}")
        numbers = pieces[1::2]
        for key in self._keys.get(".0".join(pieces[::2])[1:], ()):
            at = match(key.parts, numbers)
            if at is not None and self._has(key.rule, at):
                return key, at
        raise ValueError(f"tensor {name} is not part of a {self._described()}")

    def _has(self, rule: Rule, at: At) -> bool:
        model = self.plan.model
        if at.expert is not None and at.expert >= model.experts:
            return False
        if at.layer is None:
            return rule.applies(model.tags)
        if at.layer >= len(model.layers):
            return False
        place = rule.when, self._kind(at.layer)
        if place not in self._applies:
            self._applies[place] = rule.applies(model.layers[at.layer] | model.tags)
        return self._applies[place]

    def _places(self, rule: Rule) -> Iterator[At]:
        experts = range(self.plan.model.experts) if "#" in rule.pattern else (None,)
        for layer in self.plan.model.places(rule):
            for expert in experts:
                yield At(layer, expert)

    def _kind(self, layer: int | None) -> int:
        if layer is None:
            return -1
        tags = self.plan.model.layers[layer]
        return self._kinds.setdefault(tags, len(self._kinds))

    def _format(self, key: Key, at: At) -> Format:
        form = self.plan.format
        if not (form.parts or form.ignored or form.targets):
            return form
        return form.of(filled(key.base, at))

    def _place(
        self, name: str, key: Key, at: At, form: Format, shape: tuple[int, ...], dtype: str
    ) -> Placed:
        rule = key.rule
        if key.suffix in CACHE:
            return place_cache(name, shape, self._spreads(at.layer).get("kv_heads"))
        logical = self._logical(rule, at)
        if key.suffix in SINGLE:
            return place_single(name, shape, logical[:-2])
        stock = tuple(spread.stock for spread in logical)
        if not key.suffix and shape == stock and (dtype in PLAIN_DTYPES or form.name == "plain"):
            factor = weight_factor(rule.correction, logical[-1]) if rule.correction else 1.0
            return Placed(tuple(s.padded for s in logical), logical, rule.fill, factor)
        plain = self.plan.format
        forms = list(dict.fromkeys((form, plain, *plain.parts)))
        found = place_companion(name, key.suffix, rule, logical, forms, shape, self.scale_fill)
        if found is None:
            raise ValueError(f"tensor {name} has shape {list(shape)}, expected {list(stock)}")
        return found

    def _logical(self, rule: Rule, at: At) -> tuple[Spread, ...]:
        sizes, spreads = self.plan.model.sizes_in(at.layer), self._spreads(at.layer)
        return tuple(spread_of(dim, sizes, spreads) for dim in rule.dims)

    def _spreads(self, layer: int | None) -> Mapping[str, Spread]:
        spreads, suffix = self.plan.spreads, self.plan.model.suffix_in(layer)
        if not suffix:
            return spreads
        return {name: spreads.get(name + suffix, spread) for name, spread in spreads.items()}

    def _described(self) -> str:
        model = self.plan.model
        return f"{model.model_type} model of {len(model.layers)} layers"


def _changed(sizes: tuple[int, ...], others: tuple[int, ...]) -> str:
    return ", ".join(str(size) for size, other in zip(sizes, others) if size != other)
