"""Padded tensors held to what the plan says of every entry, by indexing: slower than padding, and
another way to the same.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tp3.pad.catalogue import Catalogue, Entry
from tp3.pad.planner import Plan
from tp3.pad.weights import spelled


def audit(
    planned: Plan, stock: Mapping[str, Tensor], padded: Mapping[str, Tensor]
) -> tuple[int, tuple[str, ...]]:
    """Number of padded entries, and the tensors where one is not its fill or a copy is not one.

    Every rank's share is a part of these tensors, so a clean audit is clean on every rank.
    """
    catalogue = Catalogue(planned)
    num_padded, wrong = 0, []
    for name, tensor in stock.items():
        entry = catalogue.entry(name, tuple(tensor.shape), spelled(tensor.dtype))
        if entry.inert:
            continue
        made = padded[name]
        expected, mask = _expected(entry, tensor)
        num_padded += int(mask.sum())
        if not torch.equal(made, expected):
            wrong.append(name)
    return num_padded, tuple(wrong)


def _expected(entry: Entry, tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The padded tensor by indexing entry by entry, and where it is padding."""
    if entry.factor != 1.0:
        tensor = (tensor.double() * entry.factor).to(tensor.dtype)
    mask = torch.zeros((), dtype=torch.bool)
    for dim, spread in enumerate(entry.spreads):
        sources = spread.sources
        index = torch.tensor([0 if source is None else source for source in sources])
        tensor = tensor.index_select(dim, index)
        shape = [1] * len(entry.spreads)
        shape[dim] = len(sources)
        mask = mask | torch.tensor([source is None for source in sources]).reshape(shape)
    assert not isinstance(entry.fill, str), "a plain weight is filled with a number"
    mask = mask.expand(tensor.shape)
    return tensor.masked_fill(mask, entry.fill), mask
