"""The monitored barrier: rank 0 hears from everybody, then answers everybody; it says who was
missing.

Messages carry negative tags, which users cannot use, one tag per barrier: a rank that comes late
leaves its word unread and disturbs nothing.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from tp3.comm.message import Message

if TYPE_CHECKING:
    from tp3.comm.p2p import Channels

_GOOD, _BAD = 1, 0
_PAUSE_SECONDS = 1e-3


def barrier(
    channels: Channels, rank: int, count: int, timeout: float, wait_all_ranks: bool
) -> None:
    """The ``count``-th monitored barrier of the group; RuntimeError on rank 0 and on those that
    reached it in vain.
    """
    (_root if rank == 0 else _member)(channels, rank, -count, timeout, wait_all_ranks)


def _root(channels: Channels, rank: int, tag: int, timeout: float, wait_all_ranks: bool) -> None:
    deadline = time.monotonic() + timeout
    missing: list[int] = []
    if timeout <= 0 and channels.peers:
        raise RuntimeError(f"Rank {rank} timed out in monitoredBarrier after {timeout * 1e3:g} ms")
    for peer in channels.peers:
        word = _message("recv", peer, tag)
        channels.post(word)
        if not _ended(channels, word, deadline):
            missing.append(peer)
            if not wait_all_ranks:
                break
    answer = _BAD if missing else _GOOD
    for peer in channels.peers:
        if peer not in missing:
            channels.post(_message("send", peer, tag, answer))
    if missing:
        ranks = ", ".join(map(str, missing))
        raise RuntimeError(
            f"Rank{'s' if len(missing) > 1 else ''} {ranks} failed to pass monitoredBarrier "
            f"in {timeout * 1e3:g} ms"
        )


def _member(channels: Channels, rank: int, tag: int, timeout: float, wait_all_ranks: bool) -> None:
    channels.post(_message("send", 0, tag))
    word = _message("recv", 0, tag, _BAD)
    channels.post(word)
    if not _ended(channels, word, time.monotonic() + timeout) or int(word.data[0]) != _GOOD:
        raise RuntimeError(
            f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting "
            "for send/recv from rank 0; see rank 0's error for the rank at fault"
        )


def _message(kind: str, peer: int, tag: int, value: int = _GOOD) -> Message:
    return Message(kind, peer, tag, np.array([value], np.uint8), "uint8[1]")


def _ended(channels: Channels, message: Message, deadline: float) -> bool:
    while not message.is_completed():
        if time.monotonic() > deadline:
            channels.cancel(message)
            return False
        time.sleep(_PAUSE_SECONDS)
    message.wait()
    return True
