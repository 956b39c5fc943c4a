"""Collectives that only move bytes through shared memory. All tensors here are flat uint8.

Every rank knows the number of rounds: sizes are equal by the signature, or exchanged in the call's
first round.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tp3.comm.transport.host import HostTransport


def broadcast(transport: HostTransport, data: Tensor, root: int) -> None:
    """``data`` of ``root`` on every rank."""
    step = transport.slot_bytes
    for start in range(0, data.numel(), step):
        piece = data[start : start + step]
        parity = transport.next_round()
        slot = transport.slot(root, parity)[: piece.numel()]
        if transport.rank == root:
            slot.copy_(piece)
        transport.sync()
        if transport.rank != root:
            piece.copy_(slot)


def all_gather(transport: HostTransport, outs: Sequence[Tensor], data: Tensor) -> None:
    """``outs[r]`` becomes the ``data`` of rank r; sizes may differ from rank to rank."""
    step, rank = transport.slot_bytes, transport.rank
    if outs[rank].data_ptr() != data.data_ptr():
        outs[rank].copy_(data)
    for start in range(0, max(out.numel() for out in outs), step):
        parity = transport.next_round()
        piece = data[start : start + step]
        transport.slot(rank, parity)[: piece.numel()].copy_(piece)
        transport.sync()
        for peer in transport.peers:
            piece = outs[peer][start : start + step]
            piece.copy_(transport.slot(peer, parity)[: piece.numel()])


def gather(
    transport: HostTransport, outs: Sequence[Tensor] | None, data: Tensor, root: int
) -> None:
    """``outs[r]`` on ``root`` becomes the ``data`` of rank r; equal sizes."""
    step, rank = transport.slot_bytes, transport.rank
    for start in range(0, data.numel(), step):
        piece = data[start : start + step]
        parity = transport.next_round()
        if rank != root:
            transport.slot(rank, parity)[: piece.numel()].copy_(piece)
        transport.sync()
        if outs is not None:
            for peer in transport.peers:
                outs[peer][start : start + step].copy_(
                    transport.slot(peer, parity)[: piece.numel()]
                )
    if outs is not None:
        outs[rank].copy_(data)


def scatter(
    transport: HostTransport, out: Tensor, inputs: Sequence[Tensor] | None, root: int
) -> None:
    """``out`` becomes ``inputs[rank]`` of ``root``; equal sizes."""
    rank, world_size = transport.rank, transport.world_size
    step = transport.slot_bytes // world_size
    for start in range(0, out.numel(), step):
        target = out[start : start + step]
        parity = transport.next_round()
        slot = transport.slot(root, parity)
        if inputs is not None:
            for peer in transport.peers:
                place = slot[peer * step : peer * step + target.numel()]
                place.copy_(inputs[peer][start : start + step])
        transport.sync()
        if rank != root:
            target.copy_(slot[rank * step : rank * step + target.numel()])
    if inputs is not None:
        out.copy_(inputs[rank])


def all_to_all(
    transport: HostTransport, outs: Sequence[Tensor], inputs: Sequence[Tensor], largest: int
) -> None:
    """``outs[r]`` becomes ``inputs[rank]`` of rank r. ``largest`` is the most bytes any pair
    exchanges.
    """
    rank, world_size = transport.rank, transport.world_size
    step = transport.slot_bytes // world_size
    outs[rank].copy_(inputs[rank])
    for start in range(0, largest, step):
        parity = transport.next_round()
        stage = transport.slot(rank, parity)
        for peer in transport.peers:
            piece = inputs[peer][start : start + step]
            stage[peer * step : peer * step + piece.numel()].copy_(piece)
        transport.sync()
        for peer in transport.peers:
            piece = outs[peer][start : start + step]
            place = transport.slot(peer, parity)[rank * step : rank * step + piece.numel()]
            piece.copy_(place)
