"""A group whose ranks do not all share memory: Gloo between hosts, the shared segment inside each.

A call's signature and sizes are exchanged over Gloo before any data, so that calls that differ end
as ``Disagreement`` here as well. Gloo bounds its waits by the group's timeout and reports a lost
peer by its address.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tp3.comm.errors import Disagreement, R4DError
from tp3.comm.layout import SIGNATURE_BYTES
from tp3.comm.tensors import Array
from tp3.comm.transport.host import HostTransport


class SpanTransport:
    """One rank's connections in a group over several hosts.

    local: the transport among the ranks of this host (its ranks count 0, 1, … within the host).
    everyone: Gloo over all ranks. across: Gloo over the ranks with the same place on their hosts,
    for the first ``parts`` places, where ``parts`` is the number of ranks on the smallest host;
    None elsewhere.
    """

    def __init__(
        self,
        local: HostTransport,
        everyone: Any,
        across: Any,
        *,
        rank: int,
        world_size: int,
        hosts: int,
        parts: int,
    ) -> None:
        self.local = local
        self.everyone = everyone
        self.across = across
        self.rank = rank
        self.world_size = world_size
        self.hosts = hosts
        self.parts = parts
        self.timeout = local.timeout
        self.calls = 0
        self.failure: str | None = None
        self._text = "creation"
        self._sizes: list[bytes] = []

    def open_call(self, signature: bytes, sizes: Sequence[int] = ()) -> None:
        """Exchange and compare what every rank calls."""
        if self.failure is not None:
            raise R4DError(f"r4d: the group is unusable since {self.failure}")
        self.calls += 1
        self._text = _text(signature)
        self.local.open_call(signature)
        words = 2 * self.world_size
        padded = [*sizes, *([0] * (words - len(sizes)))]
        mine = signature + struct.pack(f"{words}q", *padded)
        own = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        all_ = [torch.empty_like(own) for _ in range(self.world_size)]
        self.run(lambda: self.everyone.allgather([all_], [own]))
        records = [bytes(record.numpy()) for record in all_]
        for peer, record in enumerate(records):
            if record[:SIGNATURE_BYTES] != signature:
                raise self.fail(
                    Disagreement(
                        f"r4d: ranks made different calls (call {self.calls} of the group): "
                        f"rank {self.rank} {self._text}; "
                        f"rank {peer} {_text(record[:SIGNATURE_BYTES])}"
                    )
                )
        self._sizes = [record[SIGNATURE_BYTES:] for record in records]

    def barrier(self) -> None:
        """Nothing to do: ``open_call`` has met everybody."""

    def sizes_of(self, rank: int, count: int) -> tuple[int, ...]:
        return struct.unpack_from(f"{count}q", self._sizes[rank])

    def run(self, start: Callable[[], Any]) -> None:
        """Start a Gloo call and wait for it; its failure is the group's."""
        try:
            start().wait()
        except RuntimeError as error:
            if isinstance(error, R4DError):
                raise
            text = f"{self._text} (call {self.calls}) failed between hosts on rank {self.rank}"
            raise self.fail(R4DError(f"r4d: {text}: {error}")) from error

    def broadcast(self, data: Array, root: int) -> None:
        """Flat ``data`` of ``root`` on every rank."""
        options = dist.BroadcastOptions()
        options.rootRank = root
        self.run(lambda: self.everyone.broadcast([torch.from_numpy(data)], options))

    def all_reduce_across(self, data: Array, op: str) -> None:
        """Flat ``data`` becomes the reduction over this rank's counterparts on the other hosts."""
        options = dist.AllreduceOptions()
        options.reduceOp = getattr(dist.ReduceOp, op)
        self.run(lambda: self.across.allreduce([torch.from_numpy(data)], options))

    def all_to_all(self, outs: Sequence[Array], inputs: Sequence[Array]) -> None:
        """``outs[r]`` becomes ``inputs[rank]`` of rank r; flat, of one dtype."""
        out_sizes, in_sizes = [array.size for array in outs], [array.size for array in inputs]
        data = np.concatenate(list(inputs))
        received = np.empty(sum(out_sizes), data.dtype)
        target, source = torch.from_numpy(received), torch.from_numpy(data)
        options = dist.AllToAllOptions()
        self.run(lambda: self.everyone.alltoall_base(target, source, out_sizes, in_sizes, options))
        start = 0
        for array, size in zip(outs, out_sizes):
            array[:] = received[start : start + size]
            start += size

    def fail(self, error: R4DError) -> R4DError:
        """Make the group unusable, release the peers on this host, and hand the error back to be
        raised.
        """
        if self.failure is None:
            self.failure = str(error)
            self.local.fail(error)
        return error

    def abort(self, reason: str) -> None:
        self.fail(R4DError(reason))
        for gloo in (self.everyone, self.across):
            if gloo is not None:
                gloo.abort()

    def set_timeout(self, seconds: float) -> None:
        self.timeout = seconds
        self.local.set_timeout(seconds)
        for gloo in (self.everyone, self.across):
            if gloo is not None:
                gloo._set_default_timeout(timedelta(seconds=seconds))

    def close(self) -> None:
        self.failure = self.failure or "it was destroyed"
        self.local.close()
        self.everyone = self.across = None


def _text(signature: bytes) -> str:
    return signature.rstrip(b"\0").decode(errors="replace")
