"""Turns: K calls of one peer on K buffers of fresh data, timed together.

Each buffer is reduced once a turn, so values stay those of one sum. Every turn starts from an
alignment of all ranks that is not timed. Peers take turns within each repeat, and who begins moves.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
from torch import Tensor

from tp3.bench.peers import Peer
from tp3.bench.ranks import Rank

WARM_TURNS = 2
WARM_CALLS = 3
# About 0.25 ms on current GPUs: the host queues alignment and replay while the stream is held.
HOLD_CYCLES = 500_000


class EagerTurn:
    """Timed by the host: the K calls and the wait for the device."""

    def __init__(self, rank: Rank, peer: Peer, source: Tensor, calls: int) -> None:
        self.rank, self.peer, self.source = rank, peer, source
        self.block = peer.room[: calls * source.numel()].view(calls, -1)
        self.buffers = list(self.block)

    def fill(self) -> None:
        self.block.copy_(self.source)

    def run(self) -> Tensor:
        """The K calls; the sum of the last."""
        last = self.source
        for x in self.buffers:
            last = self.peer.reduce(x)
        return last

    def seconds(self) -> float:
        """Seconds per call of one turn."""
        self.fill()
        self.rank.align()
        self.rank.wait()
        start = time.perf_counter()
        self.run()
        self.rank.wait()
        return (time.perf_counter() - start) / len(self.buffers)


class GraphTurn(EagerTurn):
    """The K calls as one CUDA graph, timed by events on the stream around a replay."""

    def __init__(self, rank: Rank, peer: Peer, source: Tensor, calls: int) -> None:
        super().__init__(rank, peer, source, calls)
        self.fill()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for x in self.buffers[:WARM_CALLS]:
                peer.reduce(x)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        # thread_local: NCCL's watchdog queries events from a thread of its own.
        with torch.cuda.graph(self.graph, stream=side, capture_error_mode="thread_local"):
            self.last = super().run()
        self.start, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def run(self) -> Tensor:
        self.graph.replay()
        return self.last

    def seconds(self) -> float:
        self.fill()
        torch.cuda._sleep(HOLD_CYCLES)
        self.rank.align()
        self.start.record()
        self.graph.replay()
        self.end.record()
        self.end.synchronize()
        milliseconds: float = self.start.elapsed_time(self.end)
        return milliseconds * 1e-3 / len(self.buffers)


TURNS: dict[str, type[EagerTurn]] = {"eager": EagerTurn, "graph": GraphTurn}


def measure(turns: Mapping[str, EagerTurn], repeats: int) -> dict[str, list[float]]:
    """Seconds per call of each peer, one figure a repeat."""
    names = list(turns)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for repeat in range(WARM_TURNS + repeats):
        first = repeat % len(names)
        for name in names[first:] + names[:first]:
            figure = turns[name].seconds()
            if repeat >= WARM_TURNS:
                seconds[name].append(figure)
    return seconds
