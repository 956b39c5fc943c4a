"""Loads and stores of Triton's interpreter, an element at once.

Its own copy an element of two bytes in two steps (memcpy of glibc), so that a load beside another
process's store could see one new byte and one old one, which the sentinel kernel takes for data.
GPUs load and store aligned elements whole.
"""

import ctypes

import numpy as np
from triton.runtime import interpreter


def load(pointers: np.ndarray, mask: np.ndarray, other: np.ndarray, dtype: np.dtype) -> np.ndarray:
    result = np.array(other, dtype)
    if mask.any():
        memory, places = _memory(pointers[mask], np.dtype(dtype))
        result[mask] = memory[places]
    return result


def store(pointers: np.ndarray, values: np.ndarray, mask: np.ndarray) -> None:
    if mask.any():
        memory, places = _memory(pointers[mask], values.dtype)
        memory[places] = values[mask]


def whole() -> None:
    """From now on in this process."""
    interpreter._interpreter.load, interpreter._interpreter.store = load, store


def _memory(pointers: np.ndarray, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """An array over all that is pointed to, and the places in it."""
    first = int(pointers.min())
    nbytes = int(pointers.max()) - first + dtype.itemsize
    bytes_there = (ctypes.c_char * nbytes).from_address(first)
    return np.frombuffer(bytes_there, dtype), (pointers - first) // dtype.itemsize
