"""torch's names for the collectives, on top of ``Group``: what both adapters have in common.

torch calls by several names (old ones and those of 2.13+) and several argument forms (a tensor or a
list, options or the bare reduce op or root). They are brought to one form here. The options'
``asyncOp`` says whether the caller goes on at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from tp3.comm.api import messages, moves, reductions
from tp3.comm.group import Group
from tp3.comm.untraced import untraced
from tp3.comm.work import Work

Tensors = Tensor | Sequence[Tensor]


def _list(tensors: Tensors) -> Sequence[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else tensors


def _lists(tensors: Sequence[Any]) -> Sequence[Sequence[Tensor]]:
    return [tensors] if len(tensors) and isinstance(tensors[0], Tensor) else tensors


def _op(opts: Any) -> Any:
    if opts is None:
        return dist.ReduceOp.SUM
    return getattr(opts, "reduceOp", opts)


def _root(opts: Any) -> int:
    root: int = 0 if opts is None else getattr(opts, "rootRank", opts)
    return root


def _sync(opts: Any) -> bool:
    return not getattr(opts, "asyncOp", True)


@untraced
class Calls:
    """The collectives of one group under torch's names. ``self.group`` is set by the adapter."""

    group: Group

    def allreduce(
        self, tensors: Tensors, opts: Any = None, timeout: timedelta | None = None
    ) -> Work:
        return reductions.all_reduce(self.group, _list(tensors), _op(opts), sync=_sync(opts))

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Work:
        return reductions.all_reduce(self.group, _list(tensors), _op(opts), sync=_sync(opts))

    def broadcast(
        self, tensors: Tensors, opts: Any = None, timeout: timedelta | None = None
    ) -> Work:
        return moves.broadcast(self.group, _list(tensors), _root(opts), sync=_sync(opts))

    def reduce(
        self, tensors: Tensors, opts: Any = None, op: Any = None, timeout: timedelta | None = None
    ) -> Work:
        kind: Any = op if op is not None else getattr(opts, "reduceOp", dist.ReduceOp.SUM)
        return reductions.reduce(self.group, _list(tensors), kind, _root(opts), sync=_sync(opts))

    def allgather(
        self,
        outs: Sequence[Any],
        inputs: Tensors,
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> Work:
        return moves.all_gather(self.group, _lists(outs), _list(inputs), sync=_sync(opts))

    def allgather_coalesced(
        self, outs: Sequence[Sequence[Tensor]], inputs: Tensors, opts: Any = None
    ) -> Work:
        by_tensor = list(zip(*outs, strict=True))  # given by rank
        return moves.all_gather(self.group, by_tensor, _list(inputs), sync=_sync(opts))

    def all_gather_single(
        self,
        output: Tensor,
        input: Tensor,
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> Work:
        return moves.all_gather_tensor(self.group, [output], [input], sync=_sync(opts))

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Work:
        return moves.all_gather_tensor(self.group, _list(outputs), _list(inputs), sync=_sync(opts))

    def reduce_scatter(
        self,
        outs: Tensors,
        inputs: Sequence[Any],
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> Work:
        return reductions.reduce_scatter(
            self.group, _list(outs), _lists(inputs), _op(opts), sync=_sync(opts)
        )

    def reduce_scatter_single(
        self,
        output: Tensor,
        input: Tensor,
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> Work:
        return reductions.reduce_scatter_tensor(
            self.group, [output], [input], _op(opts), sync=_sync(opts)
        )

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Work:
        return reductions.reduce_scatter_tensor(
            self.group, _list(outputs), _list(inputs), _op(opts), sync=_sync(opts)
        )

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: Sequence[int] = (),
        input_splits: Sequence[int] = (),
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> Work:
        return moves.all_to_all_tensor(
            self.group, output, input, output_splits or (), input_splits or (), sync=_sync(opts)
        )

    def alltoall(self, outs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> Work:
        return moves.all_to_all(self.group, outs, inputs, sync=_sync(opts))

    def gather(
        self,
        outs: Sequence[Any],
        inputs: Tensors,
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> Work:
        return moves.gather(self.group, _lists(outs), _list(inputs), _root(opts), sync=_sync(opts))

    def scatter(
        self,
        outs: Tensors,
        inputs: Sequence[Any],
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> Work:
        return moves.scatter(self.group, _list(outs), _lists(inputs), _root(opts), sync=_sync(opts))

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Work:
        return messages.barrier(self.group, sync=_sync(opts))

    def send(self, tensors: Tensors, dstRank: int, tag: int = 0) -> Work:
        return messages.send(self.group, _one(tensors, "send"), dstRank, tag)

    def recv(self, tensors: Tensors, srcRank: int, tag: int = 0) -> Work:
        return messages.recv(self.group, _one(tensors, "recv"), srcRank, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Work:
        return messages.recv_any(self.group, _one(tensors, "recv"), tag)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        timeout = getattr(timeout, "timeout", timeout)  # BarrierOptions, from torch 2.14 on
        if isinstance(timeout, float):
            timeout = timedelta(seconds=timeout)
        messages.monitored_barrier(self.group, timeout, wait_all_ranks=wait_all_ranks)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _one(tensors: Tensors, what: str) -> Tensor:
    tensors = _list(tensors)
    if len(tensors) != 1:
        raise ValueError(f"{what} takes one tensor, got {len(tensors)}")
    return tensors[0]
