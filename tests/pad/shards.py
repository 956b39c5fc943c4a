"""What a rank of an engine holds of a padded model, and what it does together with the others.

Weights are cut as tensor-parallel engines cut them: rows of projections into heads and columns,
columns of projections out of them, sections each by itself, the vocabulary by rows. A rank's
partial results are summed where an engine calls all_reduce (``summed``); nothing else crosses.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Ranks:
    """All ranks of a model in one process: the padded tensors and the padded config."""

    tp: int
    weights: Weights
    config: Mapping[str, Any]

    def __getitem__(self, name: str) -> Tensor:
        """A tensor that every rank has whole."""
        return self.weights[name]

    def __contains__(self, name: str) -> bool:
        return name in self.weights

    def eps(self, norm: str) -> float:
        """A norm's eps, by the factor that the padded config has for it."""
        factors = self.config.get("tp3", {}).get("norm_eps_factors", {})
        return self.config["rms_norm_eps"] * factors.get(re.sub(r"\.\d+\.", ".*.", norm), 1.0)

    @property
    def head_dim(self) -> int:
        """As an engine derives it where the config does not say it."""
        c = self.config
        return int(c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"])

    def cut(self, name: str, rank: int, dim: int = 0, sections: Iterable[int] = ()) -> Tensor:
        """A rank's share of a dimension, or of each of its sections; a section that does not grow
        with the ranks is given as a negative length and is every rank's.
        """
        tensor = self.weights[name]
        parts = tensor.split([abs(each) for each in sections] or tensor.shape[dim], dim)
        whole = [length < 0 for length in sections] or [False]
        return torch.cat(
            [
                part if kept else self._share(part, rank, dim)
                for part, kept in zip(parts, whole, strict=True)
            ],
            dim,
        )

    def _share(self, tensor: Tensor, rank: int, dim: int) -> Tensor:
        assert tensor.shape[dim] % self.tp == 0, (tensor.shape, dim, self.tp)
        return tensor.chunk(self.tp, dim)[rank]

    def heads(self, name: str, rank: int, head_dim: int) -> Tensor:
        """A rank's KV heads; ranks share one where there are fewer heads than ranks."""
        tensor = self.weights[name].unflatten(0, (-1, head_dim))
        heads = tensor.shape[0]
        if heads % self.tp:
            assert self.tp % heads == 0, (heads, self.tp)
            tensor = tensor.repeat_interleave(self.tp // heads, 0)
        return self._share(tensor, rank, 0).flatten(0, 1)

    def summed(self, partial: Callable[[int], Tensor]) -> Tensor:
        """all_reduce: the sum of what each rank has."""
        return sum((partial(rank) for rank in range(1, self.tp)), partial(0))

    def embedded(self, name: str, tokens: Tensor) -> Tensor:
        """Each rank looks up the tokens of its rows; the others are 0 to it."""

        def partial(rank: int) -> Tensor:
            rows = self.cut(name, rank)
            local = tokens - rank * rows.shape[0]
            mine = (local >= 0) & (local < rows.shape[0])
            return rows[local.where(mine, 0)] * mine[:, None]

        return self.summed(partial)

    def logits(self, name: str, hidden: Tensor) -> Tensor:
        """all_gather: each rank has the logits of its rows."""
        return torch.cat([hidden @ self.cut(name, rank).T for rank in range(self.tp)], -1)
