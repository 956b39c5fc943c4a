"""An element that another process writes is seen as it was or as it is."""

import ctypes
import mmap
import os
import signal

import numpy as np

from tests.kernels import elements

COUNT, TURNS = 512, 20_000
OLD, NEW = 0xFFFF, 0x40B0  # what is empty, and a value


def test_loads_are_whole_beside_stores():
    memory = mmap.mmap(-1, 2 * COUNT)
    shared, everywhere = np.frombuffer(memory, np.uint16), np.ones(COUNT, bool)
    first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    pointers = (first + 2 * np.arange(COUNT)).astype(np.uint64)
    shared[:] = OLD
    writer = os.fork()
    if not writer:
        while True:
            for value in (NEW, OLD):
                shared[:] = value
    try:
        seen: set[int] = set()
        for _ in range(TURNS):
            got = elements.load(pointers, everywhere, shared, np.dtype(np.uint16))
            seen.update(np.unique(got).tolist())
    finally:
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
    assert seen == {OLD, NEW}


def test_masks_and_shapes():
    data, reverse = np.arange(24, dtype=np.float32), np.arange(24)[::-1].reshape(4, 6)
    pointers, mask = (data.ctypes.data + 4 * reverse).astype(np.uint64), reverse % 3 == 0
    got = elements.load(pointers, mask, np.full((4, 6), -1.0), data.dtype)
    assert (got == np.where(mask, reverse, -1)).all()
    elements.store(pointers, np.full((4, 6), 100, data.dtype), mask)
    assert (data == np.where(np.arange(24) % 3, np.arange(24), 100)).all()
    elements.store(pointers, got, ~mask & mask)
    assert (elements.load(pointers, ~mask & mask, got, data.dtype) == got).all()
    assert (data == 100).sum() == 8
