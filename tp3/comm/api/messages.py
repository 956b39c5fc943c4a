"""Barriers and point-to-point messages: what they check and what they run."""

from __future__ import annotations

from datetime import timedelta

from torch import Tensor

from tp3.comm import tensors as dense
from tp3.comm.api import arguments as args
from tp3.comm.group import Group
from tp3.comm.message import ANY_SOURCE, Message
from tp3.comm.work import Work


def barrier(group: Group, *, sync: bool) -> Work:
    """Returns after every rank has called it."""

    def run() -> None:
        group.open("barrier")
        group.exchange(0)

    return group.submit(run, (), sync=sync)


def monitored_barrier(group: Group, timeout: timedelta | None, *, wait_all_ranks: bool) -> None:
    """A barrier whose rank 0 names who did not come; the group stays usable."""
    group.check_open()
    seconds = (group.timeout if timeout is None else timeout).total_seconds()
    group.channels.monitored_barrier(seconds, wait_all_ranks=wait_all_ranks)


def send(group: Group, tensor: Tensor, receiver: int, tag: int) -> Work:
    """Start sending; the tensor may be changed again once the work has ended."""
    args.check([tensor], "send")
    args.check_peer(group, receiver, "send to")
    group.check_open()
    return group.channels.post(
        Message("send", receiver, tag, dense.flat(tensor), dense.describe(tensor))
    )


def recv(group: Group, tensor: Tensor, sender: int, tag: int) -> Work:
    """Start receiving what ``sender`` sends with ``tag``."""
    args.check_peer(group, sender, "recv from")
    return _receive(group, tensor, sender, tag)


def recv_any(group: Group, tensor: Tensor, tag: int) -> Work:
    """Start receiving from whoever sends with ``tag`` first."""
    return _receive(group, tensor, ANY_SOURCE, tag)


def _receive(group: Group, tensor: Tensor, sender: int, tag: int) -> Work:
    args.check([tensor], "recv", written=True)
    group.check_open()
    data = dense.flat(tensor)
    return group.channels.post(
        Message(
            "recv",
            sender,
            tag,
            data,
            dense.describe(tensor),
            result=[tensor],
            scatter=lambda: dense.copy_back(tensor, data),
        )
    )
