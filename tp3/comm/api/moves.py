"""Collectives that move bytes: what they check and what they run."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tp3.comm import tensors as dense
from tp3.comm.api import arguments as args
from tp3.comm.group import Group
from tp3.comm.work import Work


def broadcast(group: Group, tensors: Sequence[Tensor], root: int, *, sync: bool) -> Work:
    """Each tensor becomes that of ``root``."""
    args.check(tensors, "broadcast", written=True)
    args.check_rank(group, root, "root")

    def run() -> None:
        for tensor in tensors:
            group.open("broadcast", tensor, tensor.shape, root=root)
            data = dense.flat(tensor)
            group.launch("broadcast", tensor, data, root)
            if group.rank != root:
                dense.copy_back(tensor, data)

    return group.submit("broadcast", run, tensors, sync=sync, on=tensors)


def all_gather(
    group: Group, outs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], *, sync: bool
) -> Work:
    """``outs[i][r]`` becomes ``inputs[i]`` of rank r; sizes may differ from rank to rank."""
    for parts, tensor in zip(outs, inputs, strict=True):
        args.check_list(group, parts, "all_gather")
        args.check([tensor], "all_gather")
        args.check(parts, "all_gather", written=True)
        args.same_dtype([tensor, *parts], "all_gather")
        args.same_numel(
            parts[group.rank], tensor, "all_gather", f"output {group.rank}", "the input"
        )

    def run() -> None:
        for parts, tensor in zip(outs, inputs, strict=True):
            gather_parts(group, parts, tensor)

    written = [tensor for parts in outs for tensor in parts]
    return group.submit("all_gather", run, written, sync=sync, on=[*written, *inputs])


def all_gather_tensor(
    group: Group, outs: Sequence[Tensor], inputs: Sequence[Tensor], *, sync: bool
) -> Work:
    """``outs[i]`` becomes the ``inputs[i]`` of all ranks one after another; equal shapes on all
    ranks.
    """
    for out, tensor in zip(outs, inputs, strict=True):
        args.check([out], "all_gather_tensor", written=True)
        args.check([tensor], "all_gather_tensor")
        args.same_dtype([out, tensor], "all_gather_tensor")
        if out.numel() != tensor.numel() * group.world_size:
            raise ValueError(
                f"all_gather_tensor got an output of {out.numel()} elements; {group.world_size} "
                f"inputs of {tensor.numel()} need {tensor.numel() * group.world_size}"
            )

    def run() -> None:
        for out, tensor in zip(outs, inputs, strict=True):
            group.open("all_gather_tensor", tensor, tensor.shape)
            data, target = dense.flat(tensor), dense.flat(out)
            parts = [target[rank * len(data) : (rank + 1) * len(data)] for rank in group.ranks]
            group.launch("all_gather", tensor, parts, data)
            dense.copy_back(out, target)

    return group.submit("all_gather_tensor", run, outs, sync=sync, on=[*outs, *inputs])


def all_to_all(
    group: Group, outs: Sequence[Tensor], inputs: Sequence[Tensor], *, sync: bool
) -> Work:
    """``outs[r]`` becomes ``inputs[rank]`` of rank r; sizes may differ from pair to pair."""
    args.check_list(group, outs, "all_to_all")
    args.check_list(group, inputs, "all_to_all")
    args.check(outs, "all_to_all", written=True)
    args.check(inputs, "all_to_all")
    args.same_dtype([*outs, *inputs], "all_to_all")

    def run() -> None:
        targets = [dense.flat(tensor) for tensor in outs]
        data = [dense.flat(tensor) for tensor in inputs]
        group.open("all_to_all", inputs[0], sizes=[len(part) for part in (*data, *targets)])
        sizes = group.exchange(2 * group.world_size, inputs[0])
        for sender, row in enumerate(sizes):
            for receiver, sent in enumerate(row[: group.world_size]):
                expected = sizes[receiver][group.world_size + sender]
                group.agree("all_to_all", inputs[0], sender, sent, receiver, expected)
        largest = max((size for row in sizes for size in row), default=0)
        group.launch("all_to_all", inputs[0], targets, data, largest)
        for tensor, target in zip(outs, targets, strict=True):
            dense.copy_back(tensor, target)

    return group.submit("all_to_all", run, outs, sync=sync, on=[*outs, *inputs])


def all_to_all_tensor(
    group: Group,
    out: Tensor,
    tensor: Tensor,
    out_splits: Sequence[int],
    in_splits: Sequence[int],
    *,
    sync: bool,
) -> Work:
    """``all_to_all`` of parts that lie along dimension 0; no splits: equal parts."""
    args.check([out, tensor], "all_to_all_tensor")
    outs = args.splits(group, out, out_splits, "output")
    inputs = args.splits(group, tensor, in_splits, "input")
    return all_to_all(group, outs, inputs, sync=sync)


def gather(
    group: Group,
    outs: Sequence[Sequence[Tensor]],
    inputs: Sequence[Tensor],
    root: int,
    *,
    sync: bool,
) -> Work:
    """``outs[0][r]`` on ``root`` becomes ``inputs[0]`` of rank r; equal shapes. ``outs`` is empty
    elsewhere.
    """
    args.check_rank(group, root, "root")
    tensor, parts = args.rooted(group, "gather", root, inputs, outs)

    def run() -> None:
        group.open("gather", tensor, tensor.shape, root=root)
        data = dense.flat(tensor)
        targets = None if parts is None else [dense.flat(part) for part in parts]
        group.launch("gather", tensor, targets, data, root)
        for part, target in zip(parts or (), targets or (), strict=True):
            dense.copy_back(part, target)

    return group.submit("gather", run, parts or (), sync=sync, on=[tensor, *(parts or ())])


def scatter(
    group: Group,
    outs: Sequence[Tensor],
    inputs: Sequence[Sequence[Tensor]],
    root: int,
    *,
    sync: bool,
) -> Work:
    """``outs[0]`` becomes ``inputs[0][rank]`` of ``root``; equal shapes. ``inputs`` is empty
    elsewhere.
    """
    args.check_rank(group, root, "root")
    tensor, parts = args.rooted(group, "scatter", root, outs, inputs)

    def run() -> None:
        group.open("scatter", tensor, tensor.shape, root=root)
        target = dense.flat(tensor)
        data = None if parts is None else [dense.flat(part) for part in parts]
        group.launch("scatter", tensor, target, data, root)
        dense.copy_back(tensor, target)

    return group.submit("scatter", run, outs, sync=sync, on=[tensor, *(parts or ())])


def gather_parts(group: Group, parts: Sequence[Tensor], tensor: Tensor) -> None:
    """The run of one ``all_gather``."""
    targets = [dense.flat(part) for part in parts]
    data = dense.flat(tensor)
    wanted = [len(target) for target in targets]
    group.open("all_gather", tensor, sizes=[len(data), *wanted])
    sizes = group.exchange(1 + group.world_size, tensor)
    for rank, row in enumerate(sizes):
        for sender, expected in enumerate(row[1:]):
            group.agree("all_gather", tensor, sender, sizes[sender][0], rank, expected)
    group.launch("all_gather", tensor, targets, data)
    for part, target in zip(parts, targets, strict=True):
        dense.copy_back(part, target)
