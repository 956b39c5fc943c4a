"""Collectives over shared device memory. All arrays here are flat tensors on one device.

The sums take their operands aligned to 16 bytes and in multiples of them; others go through a
padded copy, so that every rank launches the same grid whatever its own alignment.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from tp3.comm.reduce import Reduction
from tp3.comm.tensors import write
from tp3.comm.transport import device_kernels as kernels
from tp3.comm.transport.device import DeviceTransport
from tp3.kernels.normed import Norm, Normed, dense

_WIDE_OPS = {"PREMUL_SUM": "SUM"}
_BOOL_OPS = {"SUM": "BOR", "MAX": "BOR", "PRODUCT": "BAND", "MIN": "BAND"}


def sentinel(transport: DeviceTransport, data: Tensor, reduction: Reduction) -> None:
    """All-reduce of ``data`` [N] in place, without flags."""
    _sum("sentinel", transport, data, data, reduction)


def one_shot(transport: DeviceTransport, data: Tensor, reduction: Reduction) -> None:
    """All-reduce of ``data`` [N] in place, everything to everybody."""
    _sum("one-shot", transport, data, data, reduction)


def two_shot(transport: DeviceTransport, data: Tensor, reduction: Reduction) -> None:
    """All-reduce of ``data`` [N] in place, by owners of parts."""
    _sum("two-shot", transport, data, data, reduction)


def nq(
    transport: DeviceTransport, x: Tensor, residual: Tensor, weight: Tensor, norm: Norm, to: Normed
) -> None:
    """The sum of ``x`` [M, K], residual, RMSNorm and FP8 in one kernel, into ``to``."""
    if x.numel():
        kernels.all_reduce_norm(transport, dense(x), dense(residual), dense(weight), norm, to)


def reduce(transport: DeviceTransport, data: Tensor, reduction: Reduction, root: int) -> None:
    """``data`` [N] of ``root`` becomes the reduction; the others keep theirs."""
    out = data if transport.rank == root else torch.empty_like(data)
    _sum("one-shot", transport, data, out, reduction)


def reduce_scatter(
    transport: DeviceTransport, out: Tensor, inputs: Sequence[Tensor], reduction: Reduction
) -> None:
    """``out`` becomes the reduction of everybody's ``inputs[rank]``; inputs may differ in size."""
    largest = max(part.numel() for part in inputs)
    if not largest:
        return
    dtype, op = _kernel_type(reduction)
    stride = _stride(inputs)
    fits = stride is not None and all(_vectors(t, stride) for t in (inputs[0], out))
    if stride is None or not fits:
        width = _padded(largest, out.element_size())
        whole = out.new_zeros((len(inputs), width))
        for row, part in zip(whole, inputs, strict=True):
            row[: part.numel()] = part
        first, target = whole[0].view(dtype), whole.new_empty(width).view(dtype)
        stride = width * out.element_size()
    else:
        first, target = inputs[0].view(dtype), out.view(dtype)
    nbytes = target.numel() * target.element_size()
    kernels.reduce_scatter_plan(transport, dtype, nbytes, stride, op).start(first, target)
    if not fits:
        write(out, target[: out.numel()].view(out.dtype))


def broadcast(transport: DeviceTransport, data: Tensor, root: int) -> None:
    """``data`` of ``root`` on every rank."""
    world_size, here = transport.world_size, kernels.Strided(data.data_ptr())
    lanes = (0, world_size) if transport.rank == root else (world_size + root, 1)
    _exchange(transport, here, here, data.numel(), lanes)


def all_gather(transport: DeviceTransport, outs: Sequence[Tensor], data: Tensor) -> None:
    """``outs[r]`` becomes the ``data`` of rank r; sizes may differ from rank to rank."""
    stride = _stride(outs)
    if stride is None:
        _table(transport, [_place(data)] * len(outs), [_place(part) for part in outs])
        return
    source, target = kernels.Strided(data.data_ptr()), kernels.Strided(outs[0].data_ptr(), stride)
    _exchange(transport, source, target, data.numel(), (0, 2 * transport.world_size))


def gather(
    transport: DeviceTransport, outs: Sequence[Tensor] | None, data: Tensor, root: int
) -> None:
    """``outs[r]`` on ``root`` becomes the ``data`` of rank r; equal sizes."""
    nothing = [(0, 0)] * transport.world_size
    if outs is None:
        here = kernels.Strided(data.data_ptr())
        _exchange(transport, here, kernels.Strided(), data.numel(), (root, 1))
        return
    sends = list(nothing)
    sends[root] = _place(data)
    _table(transport, sends, [_place(part) for part in outs])


def scatter(
    transport: DeviceTransport, out: Tensor, inputs: Sequence[Tensor] | None, root: int
) -> None:
    """``out`` becomes ``inputs[rank]`` of ``root``; equal sizes."""
    if inputs is None:
        here = kernels.Strided(out.data_ptr())
        lanes = (transport.world_size + root, 1)
        _exchange(transport, kernels.Strided(), here, out.numel(), lanes)
        return
    receives = [(0, 0)] * transport.world_size
    receives[root] = _place(out)
    _table(transport, [_place(part) for part in inputs], receives)


def all_to_all(
    transport: DeviceTransport, outs: Sequence[Tensor], inputs: Sequence[Tensor], largest: int
) -> None:
    """``outs[r]`` becomes ``inputs[rank]`` of rank r. ``largest`` is not needed here."""
    to, back = _stride(inputs), _stride(outs)
    if to is None or back is None or inputs[0].numel() != outs[0].numel():
        sends, receives = [_place(t) for t in inputs], [_place(t) for t in outs]
        _table(transport, sends, receives)
        return
    source = kernels.Strided(inputs[0].data_ptr(), to)
    target = kernels.Strided(outs[0].data_ptr(), back)
    _exchange(transport, source, target, inputs[0].numel(), (0, 2 * transport.world_size))


def send(transport: DeviceTransport, data: Tensor, receiver: int, tag: int) -> None:
    """Hand ``data`` to the stream for ``receiver``."""
    here = kernels.Strided(data.data_ptr())
    _message(transport, here, kernels.Strided(), data.numel(), receiver, tag)


def recv(transport: DeviceTransport, data: Tensor, sender: int, tag: int) -> None:
    """``data`` becomes what ``sender`` sends with ``tag``."""
    here, lane = kernels.Strided(data.data_ptr()), transport.world_size + sender
    _message(transport, kernels.Strided(), here, data.numel(), lane, tag)


def _message(
    transport: DeviceTransport,
    source: kernels.Strided,
    target: kernels.Strided,
    num_bytes: int,
    lane: int,
    tag: int,
) -> None:
    if num_bytes:
        kernels.exchange(
            transport, sources=source, targets=target, num_bytes=num_bytes, lanes=(lane, 1),
            channels=kernels.MESSAGES, tag=tag,
        )  # fmt: skip


def _exchange(
    transport: DeviceTransport,
    sources: kernels.Strided,
    targets: kernels.Strided,
    num_bytes: int,
    lanes: tuple[int, int],
) -> None:
    tag = transport.next_tag()
    if num_bytes:
        kernels.exchange(
            transport, sources=sources, targets=targets, num_bytes=num_bytes, lanes=lanes, tag=tag
        )


def _table(
    transport: DeviceTransport,
    sends: Sequence[tuple[int, int]],
    receives: Sequence[tuple[int, int]],
) -> None:
    kernels.exchange_table(transport, sends, receives, tag=transport.next_tag())


def repeatable(
    transport: DeviceTransport, algorithm: str, tensor: Tensor, reduction: Reduction
) -> kernels.Plan | None:
    """What to start for every later all-reduce of a dense aligned tensor like this one."""
    dtype, op = _kernel_type(reduction)
    if reduction.op == "PREMUL_SUM" or not tensor.is_floating_point() or not _vectors(tensor):
        return None
    nbytes = tensor.numel() * tensor.element_size()
    return kernels.all_reduce_plan(transport, algorithm, dtype, nbytes, op)


def _sum(
    algorithm: str, transport: DeviceTransport, data: Tensor, out: Tensor, reduction: Reduction
) -> None:
    if not data.numel():
        return
    dtype, op = _kernel_type(reduction)
    x, target = data, out
    if not (_vectors(data) and _vectors(out)):
        x = target = data.new_zeros(_padded(data.numel(), data.element_size()))
        x[: data.numel()] = data
    nbytes = x.numel() * x.element_size()
    plan = kernels.all_reduce_plan(transport, algorithm, dtype, nbytes, op)
    plan.start(x, target)
    if x is not data:
        write(out, x[: data.numel()])


@lru_cache(maxsize=256)
def _kernel_type(reduction: Reduction) -> tuple[torch.dtype, str]:
    """The dtype that the kernel adds, and its name of the op."""
    op = _WIDE_OPS.get(reduction.op, reduction.op)
    if reduction.dtype is torch.bool:
        return torch.uint8, _BOOL_OPS.get(op, op)
    if reduction.dtype in (torch.float16, torch.bfloat16):
        return reduction.dtype, op
    return reduction.storage, op


def _place(data: Tensor) -> tuple[int, int]:
    return data.data_ptr(), data.numel() * data.element_size()


def _padded(numel: int, item: int) -> int:
    per_vector = kernels.VECTOR_BYTES // item
    return -(-numel // per_vector) * per_vector


def _vectors(data: Tensor, stride: int = 0) -> bool:
    """Whether ``data`` (and its neighbours ``stride`` bytes on) is made of aligned vectors."""
    nbytes = data.numel() * data.element_size()
    return not (data.data_ptr() | nbytes | stride) % kernels.VECTOR_BYTES


def _stride(parts: Sequence[Tensor]) -> int | None:
    """Bytes from each part to the next if they are alike and evenly spaced, forwards."""
    first = parts[0]
    stride = parts[1].data_ptr() - first.data_ptr()
    even = stride >= 0 and all(
        part.numel() == first.numel() and part.data_ptr() == first.data_ptr() + r * stride
        for r, part in enumerate(parts)
    )
    return stride if even else None
