"""Barriers and point-to-point messages: what they check and what they run."""

from __future__ import annotations

from datetime import timedelta

import torch
from torch import Tensor

from tp3.comm import tensors as dense
from tp3.comm.api import arguments as args
from tp3.comm.group import Group
from tp3.comm.message import ANY_SOURCE, Message
from tp3.comm.work import Work


def barrier(group: Group, *, sync: bool) -> Work:
    """Returns after every rank has called it."""

    issued = group.device_event()

    def run() -> None:
        if issued is not None:
            issued.synchronize()
        group.open("barrier")
        group.exchange(0)

    return group.submit("barrier", run, (), sync=sync)


def monitored_barrier(group: Group, timeout: timedelta | None, *, wait_all_ranks: bool) -> None:
    """A barrier whose rank 0 names who did not come; the group stays usable."""
    group.check_open()
    seconds = (group.timeout if timeout is None else timeout).total_seconds()
    group.channels.monitored_barrier(seconds, wait_all_ranks=wait_all_ranks)


def send(group: Group, tensor: Tensor, receiver: int, tag: int) -> Work:
    """Start sending; the tensor may be changed again once the work has ended."""
    args.check([tensor], "send")
    args.check_rank(group, receiver, "the rank to send to")
    group.check_open()
    return group.note(_send(group, tensor, receiver, tag))


def _send(group: Group, tensor: Tensor, receiver: int, tag: int) -> Work:
    if receiver == group.rank:
        return group.loopback.send(tensor, tag)
    data = dense.flat(tensor)
    if not isinstance(data, Tensor):
        return group.channels.post(Message("send", receiver, tag, data, dense.describe(tensor)))
    side = group.device_side(tensor.device)
    work = side.send(data, receiver, tag)
    if work is None:
        text, copy = dense.describe(tensor), data.cpu().view(torch.uint8).numpy()
        work = group.channels.post(Message("send", receiver, tag, copy, text))
    return work


def recv(group: Group, tensor: Tensor, sender: int, tag: int) -> Work:
    """Start receiving what ``sender`` sends with ``tag``."""
    args.check_rank(group, sender, "the rank to recv from")
    return group.note(_receive(group, tensor, sender, tag))


def recv_any(group: Group, tensor: Tensor, tag: int) -> Work:
    """Start receiving from whoever sends with ``tag`` first."""
    return group.note(_receive(group, tensor, ANY_SOURCE, tag))


def _receive(group: Group, tensor: Tensor, sender: int, tag: int) -> Work:
    args.check([tensor], "recv", written=True)
    group.check_open()
    if sender == group.rank:
        return group.loopback.recv(tensor, tag)
    data = dense.flat(tensor)
    if isinstance(data, Tensor):
        if sender == ANY_SOURCE:
            raise ValueError(
                f"recv from any source needs a CPU tensor, got one on {tensor.device}; name the "
                "sender"
            )
        side = group.device_side(tensor.device)
        work = side.recv(tensor, data, sender, tag)
        if work is not None:
            return work
        data = data.cpu().view(torch.uint8).numpy()
    return group.channels.post(
        Message(
            "recv",
            sender,
            tag,
            data,
            dense.describe(tensor),
            result=[tensor],
            scatter=lambda: _arrive(tensor, data),
        )
    )


def _arrive(tensor: Tensor, data: dense.Array) -> None:
    dense.copy_back(tensor, data)
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()  # the copy is this thread's
