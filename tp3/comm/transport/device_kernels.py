"""How the kernels are started: which constants, how many blocks. All of it follows from the shape,
the group and what ``agree_on_blocks`` settled, so it is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from tp3.comm.layout import MAX_BLOCKS, DeviceLayout
from tp3.comm.transport.device import DeviceTransport
from tp3.kernels.exchange import exchange_kernel
from tp3.kernels.launch import Kept
from tp3.kernels.norm import bits_of, constants_of, warps_of
from tp3.kernels.normed import Norm, Normed
from tp3.kernels.one_shot import one_shot_kernel
from tp3.kernels.operands import multiplies_e4m3
from tp3.kernels.sentinel import sentinel_kernel
from tp3.kernels.sentinel_norm import sentinel_norm_kernel
from tp3.kernels.two_shot import two_shot_kernel

VECTOR_BYTES = 16
COLLECTIVES, MESSAGES = 0, 1  # sets of channels
MESSAGE_CHANNELS = 4
_LANES_PER_WARP = 32
_COPY_TILE_BYTES = 8 << 10
_AHEAD = 1
_COPY_WARPS, _COPY_REGISTERS = 8, 128
_TYPES = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.int64: tl.int64,
    torch.int32: tl.int32,
    torch.int16: tl.int16,
    torch.int8: tl.int8,
    torch.uint8: tl.uint8,
    torch.uint16: tl.uint16,
    torch.uint32: tl.uint32,
    torch.uint64: tl.uint64,
}
# By bytes of an element: the integer of that width, and a NaN that is not all ones.
_BITS = {2: (tl.int16, 0x7FFF), 4: (tl.int32, 0x7FFFFFFF), 8: (tl.int64, (1 << 63) - 1)}
# By the bytes that all addresses and sizes are multiples of: the word that is copied.
_WORDS = {16: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


@dataclass(frozen=True)
class Shape:
    """A block of a sum kernel: bytes of its tile, warps, and the registers a thread may have."""

    tile_bytes: int
    warps: int
    registers: int = 64

    @property
    def threads(self) -> int:
        return self.warps * _LANES_PER_WARP


# H200, W=2, bf16: see benchmarks/results/allreduce-shapes_2xh200_2026-11-29.md.
SHAPES = {
    "sentinel": Shape(4 << 10, 8),
    "one-shot": Shape(32 << 10, 16),
    "two-shot": Shape(16 << 10, 16, 128),
}


@dataclass(frozen=True)
class Plan:
    """A sum kernel for messages of one size: what it takes beside the addresses."""

    transport: DeviceTransport
    kept: Kept
    blocks: int
    counts: tuple[int, ...]

    def start(self, x: Tensor, out: Tensor) -> None:
        """x, out: flat, 16-byte aligned, multiples of 16 bytes; may be the same."""
        addresses = x.data_ptr(), out.data_ptr()
        self.transport.start(self.kept, (self.blocks, 1), *addresses, *self.counts)


def all_reduce_plan(
    transport: DeviceTransport, algorithm: str, dtype: torch.dtype, nbytes: int, op: str
) -> Plan:
    """``algorithm`` ("sentinel", "one-shot" or "two-shot") for a message of ``nbytes``."""
    shape, vectors = shape_of(algorithm, op, transport.world_size), nbytes // VECTOR_BYTES
    make, parts, counts = {
        "sentinel": (_sentinel, 1, (vectors,)),
        "one-shot": (_one_shot, 1, (0, vectors)),
        "two-shot": (_two_shot, transport.world_size, (vectors,)),
    }[algorithm]
    kept = transport.kernel((algorithm, dtype, op), lambda: make(transport, shape, dtype, op))
    blocks = _blocks(transport, algorithm, shape, -(-nbytes // parts))
    return Plan(transport, kept, blocks, counts)


def reduce_scatter_plan(
    transport: DeviceTransport, dtype: torch.dtype, nbytes: int, stride: int, op: str
) -> Plan:
    """One-shot for W parts of ``nbytes`` each, ``stride`` bytes from one to the next."""
    shape = shape_of("one-shot", op, transport.world_size)
    kept = transport.kernel(
        ("reduce-scatter", dtype, op), lambda: _one_shot(transport, shape, dtype, op, parts=1)
    )
    counts = stride // VECTOR_BYTES, nbytes // VECTOR_BYTES
    return Plan(transport, kept, _blocks(transport, "one-shot", shape, nbytes), counts)


def all_reduce_norm(
    transport: DeviceTransport, x: Tensor, residual: Tensor, weight: Tensor, norm: Norm, to: Normed
) -> None:
    """Start the fused kernel on dense operands, with a row for each turn of a block."""
    rows, width = x.shape
    shape = Shape(2 * width, warps_of(width, transport.target))
    kept = transport.kernel(
        ("nq", width, norm.plus_one, norm.quant), lambda: _norm(transport, shape, width, norm)
    )
    blocks = min(transport.room(shape.threads, shape.registers), MAX_BLOCKS, rows)
    addresses = [0 if t is None else t.data_ptr() for t in (x, residual, weight, *to)]
    transport.start(kept, (blocks, 1), *addresses, rows, bits_of(norm.eps))


@dataclass(frozen=True)
class Strided:
    """Where the messages to (or from) all ranks lie: rank r's at ``address + r * stride``."""

    address: int = 0
    stride: int = 0


def exchange(
    transport: DeviceTransport,
    *,
    sources: Strided = Strided(),
    targets: Strided = Strided(),
    num_bytes: int,
    lanes: tuple[int, int],
    channels: int = COLLECTIVES,
    tag: int = 0,
) -> None:
    """Messages of equal size on ``lanes`` (first, number): r sends to rank r, W + r receives from
    it.
    """
    numbers = (sources.address, sources.stride, targets.address, targets.stride, num_bytes)
    kept, limit = _exchange(transport, numbers, channels, table=0)
    chunks = -(-num_bytes // DeviceLayout.CHUNK_BYTES)
    first, count = lanes
    more = (first, tag, channels, limit, transport.rank)
    page = "messages" if channels == MESSAGES else "calls"
    transport.start(kept, (count, min(chunks, limit)), *numbers, 0, *more, page=page)


def load_exchange(transport: DeviceTransport) -> None:
    """Load what messages of any alignment need: a receive that waits on the device would keep its
    process from loading the kernel of the send that its peer waits for.
    """
    for vector in _WORDS:
        _exchange_kernel(transport, 0, vector)


def exchange_table(
    transport: DeviceTransport,
    sends: Sequence[tuple[int, int]],
    receives: Sequence[tuple[int, int]],
    *,
    tag: int = 0,
    trial: bool = False,
) -> None:
    """Messages of any sizes: for each rank the address and bytes of what goes there, and of what
    comes from it. 0 bytes: nothing, on both ends. trial: failing does not fail the group.
    """
    rows = [number for pair in (*sends, *receives) for number in pair]
    sticky = DeviceLayout.TRIAL if trial else DeviceLayout.STICKY
    kept, limit = _exchange(transport, rows, COLLECTIVES, table=1, sticky=sticky)
    chunks = -(-max(rows[1::2]) // DeviceLayout.CHUNK_BYTES)
    if chunks:
        grid = (2 * transport.world_size, min(chunks, limit))
        more = (0, tag, COLLECTIVES, limit, transport.rank)
        page = "trial" if trial else "calls"
        transport.start_with_table(kept, grid, rows, 5, 0, 0, 0, 0, 0, *more, page=page)


def shape_of(algorithm: str, op: str, world_size: int) -> Shape:
    """One-shot's large tile is for two ranks; more, or a division, would spill registers."""
    shape = SHAPES[algorithm]
    if algorithm == "one-shot" and (op == "AVG" or world_size > 2):
        return replace(shape, tile_bytes=shape.tile_bytes // 2)
    return shape


def _blocks(transport: DeviceTransport, algorithm: str, shape: Shape, nbytes: int) -> int:
    """How many blocks share a message (or part) of ``nbytes``."""
    most = min(transport.room(shape.threads, shape.registers), MAX_BLOCKS)
    if algorithm != "sentinel":  # whose slots hold any message
        most = min(most, transport.layout.slot_bytes // shape.tile_bytes)
    return min(most, -(-nbytes // shape.tile_bytes))


def _one_shot(
    transport: DeviceTransport, shape: Shape, dtype: torch.dtype, op: str, parts: int = 0
) -> Kept:
    constants = {"PARTS": parts, **_counted(transport, shape, dtype, op)}
    return _kept(one_shot_kernel, constants, shape, num_args=7)


def _two_shot(transport: DeviceTransport, shape: Shape, dtype: torch.dtype, op: str) -> Kept:
    return _kept(two_shot_kernel, _counted(transport, shape, dtype, op), shape, num_args=6)


def _sentinel(transport: DeviceTransport, shape: Shape, dtype: torch.dtype, op: str) -> Kept:
    layout = transport.layout
    bits, nan = _BITS[dtype.itemsize]
    constants = {
        **_common(transport, shape, dtype, op),
        "BITS": bits,
        "NAN": nan,
        "AHEAD": _AHEAD,
        "SLOT_BYTES": layout.sentinel_bytes,
        "BASE": layout.sentinels,
        "LAUNCHES": layout.SENTINELS,
    }
    return _kept(sentinel_kernel, constants, shape, num_args=6)


def _norm(transport: DeviceTransport, shape: Shape, width: int, norm: Norm) -> Kept:
    layout = transport.layout
    native = multiplies_e4m3(transport.device)
    constants = {
        **constants_of(width, norm, transport.target, native=native),
        "NAN": _BITS[2][1],
        "RANK": transport.rank,
        "WORLD": transport.world_size,
        "AHEAD": _AHEAD,
        "LANES": shape.threads,
        "SLOT_BYTES": layout.sentinel_bytes,
        "BASE": layout.sentinels,
        "LAUNCHES": layout.SENTINELS,
        "STICKY": layout.STICKY,
        "MAX_BLOCKS": MAX_BLOCKS,
    }
    return _kept(sentinel_norm_kernel, constants, shape, num_args=11)


def _counted(
    transport: DeviceTransport, shape: Shape, dtype: torch.dtype, op: str
) -> dict[str, Any]:
    """Constants of the kernels that count by launch."""
    layout = transport.layout
    return {
        **_common(transport, shape, dtype, op),
        "SLOT_BYTES": layout.slot_bytes,
        "LAUNCHES": layout.LAUNCHES,
        "FLAGS": layout.FLAGS,
    }


def _common(
    transport: DeviceTransport, shape: Shape, dtype: torch.dtype, op: str
) -> dict[str, Any]:
    return {
        "DTYPE": _TYPES[dtype],
        "OP": op,
        "RANK": transport.rank,
        "WORLD": transport.world_size,
        "TILE": shape.tile_bytes // dtype.itemsize,
        "LANES": shape.threads,
        "STICKY": transport.layout.STICKY,
        "MAX_BLOCKS": MAX_BLOCKS,
        "TARGET": transport.target,
    }


def _kept(kernel: Any, constants: dict[str, Any], shape: Shape, *, num_args: int) -> Kept:
    return Kept(
        kernel,
        constants,
        num_args=num_args,
        num_warps=shape.warps,
        max_registers=shape.registers,
    )


def _exchange(
    transport: DeviceTransport,
    numbers: Sequence[int],
    channels: int,
    *,
    table: int,
    sticky: int = DeviceLayout.STICKY,
) -> tuple[Kept, int]:
    """The kernel for addresses and sizes ``numbers``, and how many channels it may use."""
    union = reduce(or_, numbers)
    vector = next(size for size in _WORDS if not union % size)
    limit = MESSAGE_CHANNELS if channels == MESSAGES else _channels(transport)
    return _exchange_kernel(transport, table, vector, sticky), limit


def _exchange_kernel(
    transport: DeviceTransport, table: int, vector: int, sticky: int = DeviceLayout.STICKY
) -> Kept:
    return transport.kernel(
        ("exchange", table, vector, sticky),
        lambda: _make_exchange(transport, table, vector, sticky),
    )


def _channels(transport: DeviceTransport) -> int:
    room = transport.room(_COPY_WARPS * _LANES_PER_WARP, _COPY_REGISTERS)
    return max(1, min(transport.layout.channels, room // (2 * transport.world_size)))


def _make_exchange(transport: DeviceTransport, table: int, vector: int, sticky: int) -> Kept:
    layout = transport.layout
    constants = {
        "TABLE": table,
        "WORD": _WORDS[vector],
        "VECTOR": vector,
        "WORLD": transport.world_size,
        "CHANNELS": layout.channels,
        "CHUNK": layout.CHUNK_BYTES,
        "DEPTH": layout.RING_CHUNKS,
        "TILE": _COPY_TILE_BYTES * 8 // _WORDS[vector].primitive_bitwidth,
        "LANES": _COPY_WARPS * _LANES_PER_WARP,
        "RINGS": layout.rings,
        "STICKY": sticky,
        "COUNTS": layout.channel_words,
        "TARGET": transport.target,
    }
    return Kept(exchange_kernel, constants, num_args=14, num_warps=_COPY_WARPS)
