"""Collectives that only move bytes through shared memory. All arrays here are flat uint8.

Every rank knows the number of rounds: sizes are equal by the signature, or exchanged in the call's
first round.
"""

from __future__ import annotations

from collections.abc import Sequence

from tp3.comm.tensors import Array, chunks
from tp3.comm.transport.host import HostTransport


def broadcast(transport: HostTransport, data: Array, root: int) -> None:
    """``data`` of ``root`` on every rank."""
    transport.reserve(data.size)
    for piece in chunks(data, transport.slot_bytes):
        slot = transport.slot(root, transport.next_round())
        if transport.rank == root:
            slot[: piece.size] = piece
        transport.sync()
        if transport.rank != root:
            piece[:] = slot[: piece.size]


def all_gather(transport: HostTransport, outs: Sequence[Array], data: Array) -> None:
    """``outs[r]`` becomes the ``data`` of rank r; sizes may differ from rank to rank."""
    rank, largest = transport.rank, max(out.size for out in outs)
    transport.reserve(largest)
    step = transport.slot_bytes
    outs[rank][:] = data
    for start in range(0, largest, step):
        parity = transport.next_round()
        piece = data[start : start + step]
        transport.slot(rank, parity)[: piece.size] = piece
        transport.sync()
        for peer in transport.peers:
            piece = outs[peer][start : start + step]
            piece[:] = transport.slot(peer, parity)[: piece.size]


def gather(transport: HostTransport, outs: Sequence[Array] | None, data: Array, root: int) -> None:
    """``outs[r]`` on ``root`` becomes the ``data`` of rank r; equal sizes."""
    rank = transport.rank
    transport.reserve(data.size)
    step = transport.slot_bytes
    for start in range(0, data.size, step):
        parity = transport.next_round()
        piece = data[start : start + step]
        if rank != root:
            transport.slot(rank, parity)[: piece.size] = piece
        transport.sync()
        if outs is not None:
            for peer in transport.peers:
                outs[peer][start : start + step] = transport.slot(peer, parity)[: piece.size]
    if outs is not None:
        outs[rank][:] = data


def scatter(
    transport: HostTransport, out: Array, inputs: Sequence[Array] | None, root: int
) -> None:
    """``out`` becomes ``inputs[rank]`` of ``root``; equal sizes."""
    rank, world_size = transport.rank, transport.world_size
    transport.reserve(out.size * world_size)
    step = transport.slot_bytes // world_size
    for start in range(0, out.size, step):
        target = out[start : start + step]
        slot = transport.slot(root, transport.next_round())
        if inputs is not None:
            for peer in transport.peers:
                place = slice(peer * step, peer * step + target.size)
                slot[place] = inputs[peer][start : start + step]
        transport.sync()
        if rank != root:
            target[:] = slot[rank * step : rank * step + target.size]
    if inputs is not None:
        out[:] = inputs[rank]


def all_to_all(
    transport: HostTransport, outs: Sequence[Array], inputs: Sequence[Array], largest: int
) -> None:
    """``outs[r]`` becomes ``inputs[rank]`` of rank r. ``largest`` is the most bytes any pair
    exchanges.
    """
    rank, world_size = transport.rank, transport.world_size
    transport.reserve(largest * world_size)
    step = transport.slot_bytes // world_size
    outs[rank][:] = inputs[rank]
    for start in range(0, largest, step):
        parity = transport.next_round()
        stage = transport.slot(rank, parity)
        for peer in transport.peers:
            piece = inputs[peer][start : start + step]
            stage[peer * step : peer * step + piece.size] = piece
        transport.sync()
        for peer in transport.peers:
            piece = outs[peer][start : start + step]
            piece[:] = transport.slot(peer, parity)[rank * step : rank * step + piece.size]
