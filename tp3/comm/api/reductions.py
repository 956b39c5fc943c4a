"""Collectives that add: what they check and what they run."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from tp3.comm import sparse
from tp3.comm import tensors as dense
from tp3.comm.api import arguments as args
from tp3.comm.api.moves import gather_parts
from tp3.comm.group import Group
from tp3.comm.reduce import reduction_of
from tp3.comm.work import DONE, Work


def all_reduce(group: Group, tensors: Sequence[Tensor], op: ReduceOp, *, sync: bool) -> Work:
    """Each tensor becomes the reduction over all ranks, with the same bits on each."""
    kind, factor = args.reduce_op(op)
    if sync and len(tensors) == 1 and group.repeat(tensors[0], kind):
        return DONE
    if any(getattr(tensor, "is_sparse", False) for tensor in tensors):
        return _all_reduce_sparse(group, tensors, kind, sync)
    args.check(tensors, "all_reduce", written=True)
    plans = [(t, reduction_of(kind, t.dtype)) for t in tensors]

    def run() -> None:
        for tensor, reduction in plans:
            group.open("all_reduce", tensor, tensor.shape, kind)
            data = dense.flat(_scaled(tensor, factor), reduction.storage)
            group.launch("all_reduce", tensor, data, reduction, op=kind)
            dense.copy_back(tensor, data)

    return group.submit("all_reduce", run, tensors, sync=sync, on=tensors)


def _all_reduce_sparse(group: Group, tensors: Sequence[Tensor], kind: str, sync: bool) -> Work:
    sparse.check(tensors, kind)

    def run() -> None:
        for tensor in tensors:
            local = tensor.detach().coalesce()
            group.open(
                "all_reduce", local.values(), tensor.shape, "SUM sparse", sizes=[local._nnz()]
            )
            counts = [size for (size,) in group.exchange(1)]
            indices, values = sparse.empty_parts(local, counts)
            gather_parts(group, indices, local.indices())
            gather_parts(group, values, local.values())
            with torch.inference_mode(tensor.is_inference()):
                tensor.copy_(sparse.add(indices, values, local))

    return group.submit("all_reduce_sparse", run, tensors, sync=sync)


def reduce(group: Group, tensors: Sequence[Tensor], op: ReduceOp, root: int, *, sync: bool) -> Work:
    """Each tensor of ``root`` becomes the reduction; the other ranks keep theirs."""
    args.check(tensors, "reduce", written=True)
    args.check_rank(group, root, "root")
    kind, factor = args.reduce_op(op)
    plans = [(t, reduction_of(kind, t.dtype)) for t in tensors]

    def run() -> None:
        for tensor, reduction in plans:
            group.open("reduce", tensor, tensor.shape, kind, root)
            data = dense.flat(_scaled(tensor, factor), reduction.storage)
            group.launch("reduce", tensor, data, reduction, root)
            if group.rank == root:
                dense.copy_back(tensor, data)

    return group.submit("reduce", run, tensors, sync=sync, on=tensors)


def reduce_scatter(
    group: Group,
    outs: Sequence[Tensor],
    inputs: Sequence[Sequence[Tensor]],
    op: ReduceOp,
    *,
    sync: bool,
) -> Work:
    """``outs[i]`` becomes the reduction of everybody's ``inputs[i][rank]``; inputs may differ in
    size.
    """
    kind, factor = args.reduce_op(op)
    for out, parts in zip(outs, inputs, strict=True):
        args.check_list(group, parts, "reduce_scatter")
        args.check([out], "reduce_scatter", written=True)
        args.check(parts, "reduce_scatter")
        args.same_dtype([out, *parts], "reduce_scatter")
        args.same_numel(
            out, parts[group.rank], "reduce_scatter", "the output", f"input {group.rank}"
        )
        reduction_of(kind, out.dtype)

    def run() -> None:
        for out, parts in zip(outs, inputs, strict=True):
            reduction = reduction_of(kind, out.dtype)
            shape = tuple(part.numel() for part in parts)
            group.open("reduce_scatter", out, shape, kind)
            data = [dense.flat(_scaled(part, factor), reduction.storage) for part in parts]
            target = dense.flat(out, reduction.storage)
            group.launch("reduce_scatter", out, target, data, reduction)
            dense.copy_back(out, target)

    used = [*outs, *(part for parts in inputs for part in parts)]
    return group.submit("reduce_scatter", run, outs, sync=sync, on=used)


def reduce_scatter_tensor(
    group: Group, outs: Sequence[Tensor], inputs: Sequence[Tensor], op: ReduceOp, *, sync: bool
) -> Work:
    """``reduce_scatter`` of inputs that are the W parts one after another."""
    parts = [
        args.parts(group, i, o, "reduce_scatter_tensor") for o, i in zip(outs, inputs, strict=True)
    ]
    return reduce_scatter(group, outs, parts, op, sync=sync)


def _scaled(tensor: Tensor, factor: float | Tensor | None) -> Tensor:
    if factor is None:
        return tensor
    if isinstance(factor, Tensor):
        factor = factor.to(tensor.device)
    return (tensor.detach() * factor).to(tensor.dtype)
