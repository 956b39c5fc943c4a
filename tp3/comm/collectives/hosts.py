"""Collectives of a group over several hosts: Gloo moves bytes, the sums are ours.

Everything but ``hierarchical`` gathers the terms and adds them in rank order, so it is exact.
``hierarchical`` moves a large all-reduce over the wire once per host instead of once per rank; its
order is by host, then by rank, accumulated wide and rounded once: equal bits on all ranks, but not
those of the canonical order.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch

from tp3.comm.collectives import moves, sums
from tp3.comm.layout import split
from tp3.comm.reduce import Reduction, reduction_of
from tp3.comm.tensors import Array
from tp3.comm.transport.span import SpanTransport


def all_reduce(span: SpanTransport, data: Array, reduction: Reduction) -> None:
    """Every rank gathers all messages and adds them. ``data`` [N] is reduced in place."""
    terms = [np.empty_like(data) for _ in range(span.world_size)]
    all_gather(span, [term.view(np.uint8) for term in terms], data.view(np.uint8))
    reduction.combine(terms, data)


def hierarchical(span: SpanTransport, data: Array, reduction: Reduction) -> None:
    """Reduce-scatter inside, all-reduce between, all-gather inside. ``data`` [N], of a
    floating-point dtype, is reduced in place.
    """
    local, whole = span.local, torch.from_numpy(data).view(reduction.dtype)
    op = "SUM" if reduction.op in ("AVG", "PREMUL_SUM") else reduction.op
    wide = whole.to(reduction.wide, copy=True)
    ends = [0, *accumulate(split(data.size, span.parts))]
    array: Array = wide.numpy()
    parts = [array[first:last] for first, last in pairwise(ends)]
    parts += [array[:0]] * (local.world_size - span.parts)
    mine = np.empty_like(parts[local.rank])
    sums.reduce_scatter(local, mine, parts, reduction_of(op, wide.dtype))
    if span.across is not None:
        span.all_reduce_across(mine, op)
    moves.all_gather(local, [part.view(np.uint8) for part in parts], mine.view(np.uint8))
    if reduction.op == "AVG":
        wide.div_(span.world_size)
    whole.copy_(wide)


def reduce(span: SpanTransport, data: Array, reduction: Reduction, root: int) -> None:
    """``data`` [N] of ``root`` becomes the reduction; the others keep theirs."""
    terms = [np.empty_like(data) for _ in range(span.world_size)] if span.rank == root else None
    views = None if terms is None else [term.view(np.uint8) for term in terms]
    gather(span, views, data.view(np.uint8), root)
    if terms is not None:
        reduction.combine(terms, data)


def reduce_scatter(
    span: SpanTransport, out: Array, inputs: Sequence[Array], reduction: Reduction
) -> None:
    """``out`` becomes the reduction of everybody's ``inputs[rank]``."""
    terms = [np.empty_like(inputs[span.rank]) for _ in range(span.world_size)]
    views = [term.view(np.uint8) for term in terms]
    span.all_to_all(views, [part.view(np.uint8) for part in inputs])
    reduction.combine(terms, out)


def broadcast(span: SpanTransport, data: Array, root: int) -> None:
    """``data`` of ``root`` on every rank."""
    if data.size:
        span.broadcast(data, root)


def all_gather(span: SpanTransport, outs: Sequence[Array], data: Array) -> None:
    """``outs[r]`` becomes the ``data`` of rank r; sizes may differ from rank to rank."""
    outs[span.rank][:] = data
    for root, out in enumerate(outs):
        broadcast(span, out, root)


def gather(span: SpanTransport, outs: Sequence[Array] | None, data: Array, root: int) -> None:
    """``outs[r]`` on ``root`` becomes the ``data`` of rank r."""
    nothing = data[:0]
    received = [nothing] * span.world_size if outs is None else outs
    span.all_to_all(received, [data if r == root else nothing for r in range(span.world_size)])


def scatter(span: SpanTransport, out: Array, inputs: Sequence[Array] | None, root: int) -> None:
    """``out`` becomes ``inputs[rank]`` of ``root``."""
    nothing = out[:0]
    received = [out if r == root else nothing for r in range(span.world_size)]
    span.all_to_all(received, [nothing] * span.world_size if inputs is None else inputs)


def all_to_all(
    span: SpanTransport, outs: Sequence[Array], inputs: Sequence[Array], largest: int
) -> None:
    """``outs[r]`` becomes ``inputs[rank]`` of rank r."""
    if largest:
        span.all_to_all(outs, inputs)
