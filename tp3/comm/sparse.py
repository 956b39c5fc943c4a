"""All-reduce of sparse COO tensors: everybody gathers everybody's entries and adds them in rank
order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tp3.comm.reduce import ALLOWED, Reduction


def check(tensors: Sequence[Tensor], op: str) -> None:
    """Raise ValueError unless these are CPU COO tensors and ``op`` is SUM."""
    for tensor in tensors:
        if tensor.layout is not torch.sparse_coo or tensor.device.type != "cpu":
            raise ValueError(
                f"all_reduce got {tensor.layout} on {tensor.device} among sparse tensors; "
                "r4d takes torch.sparse_coo on cpu"
            )
        if op != "SUM" or tensor.dtype not in ALLOWED:
            raise ValueError(f"r4d has no {op} of sparse {tensor.dtype}; allowed: SUM")


def empty_parts(local: Tensor, counts: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
    """Room for each rank's indices [sparse_dim, n_r] and values [n_r, ...]."""
    indices, values = local.indices(), local.values()
    return (
        [indices.new_empty((indices.shape[0], count)) for count in counts],
        [values.new_empty((count, *values.shape[1:])) for count in counts],
    )


def add(indices: Sequence[Tensor], values: Sequence[Tensor], like: Tensor) -> Tensor:
    """The sum, coalesced, of ``like``'s shape: rank order, accumulated wide, rounded once.

    Each rank's indices are unique, so ``index_add_`` adds at most one value to a place per rank.
    """
    places, owner = torch.cat(list(indices), dim=1).unique(dim=1, return_inverse=True)
    wide = Reduction("SUM", like.dtype).wide
    total = torch.zeros((places.shape[1], *like.values().shape[1:]), dtype=wide)
    start = 0
    for part in values:
        stop = start + part.shape[0]
        total.index_add_(0, owner[start:stop], part.to(wide))
        start = stop
    return torch.sparse_coo_tensor(places, total.to(like.dtype), like.shape, is_coalesced=True)
