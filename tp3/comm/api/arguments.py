"""Checks of what a caller passes: ValueError in one sentence, before anything has moved."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from tp3.comm.group import Group
from tp3.comm.reduce import op_name, premul_factor
from tp3.comm.select import DEVICES


def check(tensors: Iterable[Any], what: str, *, written: bool = False) -> None:
    """All are strided tensors on a device that r4d serves; ``written`` ones have room for each
    element.
    """
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{what} needs tensors, got {type(tensor).__name__}")
        if tensor.device.type not in DEVICES:
            raise ValueError(
                f"{what} got a tensor on {tensor.device}; r4d serves {', '.join(DEVICES)}"
            )
        if tensor.layout is not torch.strided:
            raise ValueError(
                f"{what} got a tensor of layout {tensor.layout}; r4d takes torch.strided"
            )
        if written and not tensor.is_contiguous() and _overlaps(tensor):
            raise ValueError(
                f"{what} cannot write a tensor of shape {list(tensor.shape)} whose elements share "
                f"memory (strides {list(tensor.stride())}); pass a contiguous one"
            )


def _overlaps(tensor: Tensor) -> bool:
    return any(size > 1 and step == 0 for size, step in zip(tensor.shape, tensor.stride()))


def same_dtype(tensors: Sequence[Tensor], what: str) -> torch.dtype:
    """The one dtype of all ``tensors``."""
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) != 1:
        names = ", ".join(sorted(map(str, dtypes))) or "none"
        raise ValueError(f"{what} needs tensors of one dtype, got {names}")
    return dtypes.pop()


def same_numel(a: Tensor, b: Tensor, what: str, name_a: str, name_b: str) -> None:
    if a.numel() != b.numel():
        raise ValueError(
            f"{what}: {name_a} has shape {list(a.shape)} and {name_b} {list(b.shape)}; "
            "they need the same number of elements"
        )


def reduce_op(op: ReduceOp) -> tuple[str, float | Tensor | None]:
    """The op's name, and the factor of a PREMUL_SUM."""
    kind = op_name(op)
    return kind, premul_factor(op) if kind == "PREMUL_SUM" else None


def check_rank(group: Group, rank: int, what: str) -> None:
    if not 0 <= rank < group.world_size:
        raise ValueError(f"{what} is {rank}; the group has ranks 0..{group.world_size - 1}")


def check_list(group: Group, parts: Sequence[Tensor], what: str) -> None:
    if len(parts) != group.world_size:
        raise ValueError(f"{what} got {len(parts)} tensors; the group has {group.world_size} ranks")


def rooted(
    group: Group,
    what: str,
    root: int,
    single: Sequence[Tensor],
    lists: Sequence[Sequence[Tensor]],
) -> tuple[Tensor, Sequence[Tensor] | None]:
    """The one tensor each rank has, and on ``root`` the list with one for each rank."""
    if len(single) != 1:
        raise ValueError(f"{what} takes one tensor on each rank, got {len(single)}")
    if group.rank != root:
        check(single, what)
        if any(lists):
            raise ValueError(
                f"{what} takes a list of tensors on root {root} only; this is rank {group.rank}"
            )
        return single[0], None
    parts = lists[0] if lists else ()
    check_list(group, parts, what)
    check(single, what)
    check(parts, what)
    same_dtype([*single, *parts], what)
    for index, part in enumerate(parts):
        same_numel(part, single[0], what, f"tensor {index} of the list", "the single one")
    return single[0], parts


def parts(group: Group, whole: Tensor, part: Tensor, what: str) -> Sequence[Tensor]:
    """``whole`` as one piece per rank, each with the elements of ``part``."""
    check([whole, part], what)
    wanted = part.numel() * group.world_size
    if whole.numel() != wanted:
        raise ValueError(
            f"{what} got an input of {whole.numel()} elements; "
            f"{group.world_size} parts of {part.numel()} need {wanted}"
        )
    return whole.reshape(group.world_size, -1).unbind(0)


def splits(group: Group, tensor: Tensor, sizes: Sequence[int], which: str) -> Sequence[Tensor]:
    """``tensor`` cut along dimension 0 into one piece per rank; no sizes: equal pieces."""
    length = tensor.shape[0] if tensor.dim() else 1
    if not sizes:
        if length % group.world_size:
            raise ValueError(
                f"all_to_all_single: dimension 0 of the {which} is {length}; without splits it "
                f"must be a multiple of {group.world_size}"
            )
        sizes = [length // group.world_size] * group.world_size
    if len(sizes) != group.world_size or sum(sizes) != length or min(sizes) < 0:
        raise ValueError(
            f"all_to_all_single: {which} splits are {list(sizes)}; they must be "
            f"{group.world_size} numbers that add up to dimension 0, which is {length}"
        )
    return torch.split(tensor, list(sizes)) if tensor.dim() else [tensor]
