"""Every tensor of a checkpoint's headers against a plan. No torch, and no weight is read.

A tensor is covered (the plan widens it), untouched on purpose (a rule says so), or an error that
names it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property

from tp3.pad.catalogue import Catalogue, Entry
from tp3.pad.headers import Header, Stored
from tp3.pad.planner import Plan

CLOSE = 0.8  # of difflib's ratio: a tensor under another name rather than one too many
MOST_COMPARED = 200  # unknown or missing tensors; beyond that the checkpoint is another model's


@dataclass(frozen=True)
class Check:
    """entries: what the plan does with each tensor that it knows. lines: the tally per rule."""

    entries: Mapping[str, Entry]
    errors: tuple[str, ...]
    lines: tuple[str, ...]

    @cached_property
    def covered(self) -> int:
        return sum(not entry.inert for entry in self.entries.values())

    @property
    def untouched(self) -> int:
        return len(self.entries) - self.covered

    def require(self) -> None:
        """Errors: ValueError with the first error, and how many more there are."""
        if self.errors:
            more = len(self.errors) - 1
            raise ValueError(self.errors[0] + (f" (and {more} more errors)" if more else ""))


def check(headers: Iterable[Header], planned: Plan) -> Check:
    """What the plan makes of the tensors in these headers."""
    catalogue = Catalogue(planned)
    stored = {name: tensor for header in headers for name, tensor in header.tensors.items()}
    entries: dict[str, Entry] = {}
    refused: dict[str, str] = {}
    for name, tensor in stored.items():
        try:
            entries[name] = catalogue.entry(name, tensor.shape, tensor.dtype)
        except ValueError as error:
            refused[name] = _naming(name, str(error))
    missing = catalogue.missing(stored.keys())
    renamed = _renamed(catalogue, {name: stored[name] for name in refused}, missing)
    for name, expected in renamed.items():
        refused[name] += f"; {expected}, of the same shape, is missing"
    lost = set(missing) - set(renamed.values())
    errors = (*refused.values(), *(f"tensor {name} is missing" for name in missing if name in lost))
    return Check(entries, errors, tuple(catalogue.lines(entries.keys())))


def _renamed(
    catalogue: Catalogue, refused: Mapping[str, Stored], missing: list[str]
) -> dict[str, str]:
    """Refused tensors that look like a missing one under another name."""
    if not 0 < len(refused) <= MOST_COMPARED or not 0 < len(missing) <= MOST_COMPARED:
        return {}
    found: dict[str, str] = {}
    for name, tensor in refused.items():
        free = [other for other in missing if other not in found.values()]
        for match in get_close_matches(name, free, n=3, cutoff=CLOSE):
            if _serves(catalogue, match, tensor):
                found[name] = match
                break
    return found


def _serves(catalogue: Catalogue, name: str, tensor: Stored) -> bool:
    try:
        catalogue.entry(name, tensor.shape, tensor.dtype)
    except ValueError:
        return False
    return True


def _naming(name: str, sentence: str) -> str:
    return sentence if name in sentence else f"tensor {name}: {sentence}"
