"""Memory for one padded tensor after another.

To give a tensor fresh pages costs more than copying it (2-core VM, 2026-11, 56 MiB: 84 ms for a new
tensor and a copy into it, 17 ms into pages that are there). A consumer's loop still holds one
tensor when it asks for the next, and has let go of those before; their pages are used again. As
long as anything refers to them, a view or a NumPy array, they are left alone.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

SMALL_BYTES = 1 << 20  # below this the allocator's own reuse will do
PLACES = 2  # the tensor that is being made, and the one that the consumer's loop still holds


class Room:
    """``room(like, shape)`` is ``like.new_empty(shape)``."""

    def __init__(self) -> None:
        self._pages: list[mmap.mmap] = []  # the one that was lent last comes last

    def __call__(self, like: Tensor, shape: Sequence[int]) -> Tensor:
        size = prod(shape) * like.element_size()
        if like.device.type != "cpu" or size < SMALL_BYTES:
            return like.new_empty(shape)
        pages = self._free(size)
        if pages is None:
            pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            pages.madvise(mmap.MADV_HUGEPAGE)
        self._pages = [*self._pages[1 - PLACES :], pages]
        return torch.frombuffer(pages, dtype=torch.uint8, count=size).view(like.dtype).view(shape)

    def _free(self, size: int) -> mmap.mmap | None:
        """Pages that are large enough and lent to nobody, taken out of the list."""
        for place in range(len(self._pages)):
            # held by the list and by getrefcount's argument
            if sys.getrefcount(self._pages[place]) == 2 and len(self._pages[place]) >= size:
                return self._pages.pop(place)
        return None
