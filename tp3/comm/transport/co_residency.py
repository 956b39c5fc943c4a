"""How many blocks a kernel that waits for other ranks may have.

All its blocks must run at once. Where ranks share a GPU, those of the ranks that wait must leave
room for whatever the last one has to run before it arrives. With more blocks that wait than an H200
has multiprocessors, products of the last rank never ran; probably because a multiprocessor with a
block on it does not divide its shared memory anew. So half of them are left alone. (The blocks of
several processes do meet on one GPU under MPS, and on AMD GPUs.)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tp3.comm.errors import R4DError

_REGISTERS = 64 << 10  # of a multiprocessor


@dataclass(frozen=True)
class Room:
    """multiprocessors: of the smallest GPU that one rank has for itself. shared: blocks where ranks
    share one. Both may be infinite.
    """

    multiprocessors: float
    shared: float

    def blocks(self, threads: int, registers: int) -> int:
        """How many blocks of so many threads with so many registers each a launch may have."""
        return int(min(self.multiprocessors * (_REGISTERS // (threads * registers)), self.shared))


def room_for(gpus: Sequence[tuple[str, int]]) -> Room:
    """gpus: which GPU each rank uses, and its multiprocessors. Errors: R4DError.

    >>> three ranks on one GPU of 132: two may wait, with 33 blocks each
    """
    alone = shared = math.inf
    lanes = 2 * len(gpus)  # the least that messages to and from all ranks take
    for (_, multiprocessors), sharing in Counter(gpus).items():
        waiting = sharing - 1
        if not waiting:
            alone = min(alone, multiprocessors)
            continue
        if waiting * lanes >= multiprocessors:
            raise R4DError(
                f"r4d: {sharing} of {len(gpus)} ranks share a GPU of {multiprocessors} "
                "multiprocessors, too many for their kernels to run at once; use more GPUs or "
                "fewer ranks"
            )
        shared = min(shared, max(multiprocessors // (2 * waiting), lanes))
    return Room(alone, shared)
