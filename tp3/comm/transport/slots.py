"""The slots of a group on one host: two per rank, as arrays; small at first, larger when needed.

A group that only ever moves small messages keeps the slots in its first segment. The first larger
message makes all ranks move to slots in a segment of their own, together: the lowest rank creates
it as large as /dev/shm decently allows, everybody attaches and answers, and one "no" leaves all of
them with the slots they have, through which a large message goes in more pieces. The segment has no
name, so nobody who is killed meanwhile leaves one. Ranks in several pid namespaces could not find
it and have no budget for it (``connect``).
"""

from __future__ import annotations

import contextlib
import mmap
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tp3.comm.layout import PAGE_BYTES, round_up
from tp3.comm.tensors import Array
from tp3.comm.transport import segment

if TYPE_CHECKING:
    from tp3.comm.transport.host import HostTransport

_BYTES_BYTES = 8
_OFFER_BYTES = 256


class Slots:
    """``nbytes`` of memory for each rank and parity, from byte ``start`` of ``memory``."""

    def __init__(self, memory: mmap.mmap, start: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._memory = memory
        self._start = start
        self._arrays: dict[tuple[int, int, npt.DTypeLike], Array] = {}

    def array(self, rank: int, parity: int, dtype: npt.DTypeLike) -> Array:
        """The whole slot as a flat array."""
        key = (rank, parity, dtype)
        array = self._arrays.get(key)
        if array is None:
            count = self.nbytes // np.dtype(dtype).itemsize
            start = self._start + (2 * rank + parity) * self.nbytes
            array = self._arrays[key] = np.frombuffer(self._memory, dtype, count, start)
        return array

    def close(self) -> None:
        """Let go of the memory."""
        self._arrays.clear()


def unmap(memory: mmap.mmap) -> None:
    """Unmap now, or when the last array of it is gone (an error's traceback may hold one)."""
    with contextlib.suppress(BufferError):
        memory.close()


def grown(transport: HostTransport, wanted: int, budget_bytes: int) -> mmap.mmap | None:
    """Memory for larger slots, or None on every rank. Three rounds.

    wanted: bytes of a slot that the call at hand could use. budget_bytes: of all slots together.
    A slot's new size is ``len(memory) // (2 · world_size)``.
    """
    fd = -1
    parity = transport.next_round()
    if transport.rank == 0:
        fd, nbytes = _create(transport, wanted, budget_bytes)
        path = f"/proc/{os.getpid()}/fd/{fd}" if nbytes else ""
        offer = nbytes.to_bytes(_BYTES_BYTES, "little") + path.encode()
        _write(transport.slot(0, parity), offer.ljust(_OFFER_BYTES, b"\0"))
    try:
        transport.sync()
        offer = transport.slot(0, parity)[:_OFFER_BYTES].tobytes()
        path = offer[_BYTES_BYTES:].rstrip(b"\0").decode()
        memory = _attach(path, int.from_bytes(offer[:_BYTES_BYTES], "little"))
        parity = transport.next_round()
        transport.slot(transport.rank, parity)[0] = memory is not None
        transport.sync()
    finally:
        if fd >= 0:
            os.close(fd)
    answers = [transport.slot(rank, parity)[0] for rank in range(transport.world_size)]
    transport.barrier()  # the answers have been read: the old slots may go
    if all(answers):
        return memory
    if memory is not None:
        memory.close()
    return None


def _create(transport: HostTransport, wanted: int, budget_bytes: int) -> tuple[int, int]:
    """Descriptor and bytes of a segment with slots of up to ``wanted``; -1 and 0 for none."""
    slots = 2 * transport.world_size
    nbytes = round_up(min(wanted, budget_bytes // slots), PAGE_BYTES)
    while nbytes > transport.slot_bytes:
        if slots * nbytes <= segment.free_bytes() // 2:
            with contextlib.suppress(RuntimeError, OSError):  # another group was quicker
                return segment.create_unnamed(slots * nbytes), slots * nbytes
        nbytes = round_up(nbytes // 2, PAGE_BYTES)
    return -1, 0


def _attach(path: str, nbytes: int) -> mmap.mmap | None:
    with contextlib.suppress(OSError, ValueError):
        return segment.attach(path, nbytes) if path else None
    return None


def _write(array: npt.NDArray[Any], data: bytes) -> None:
    array[: len(data)] = np.frombuffer(data, np.uint8)
