"""Operands whose neighbours must not be read: on CPU pages that cannot be, elsewhere NaN codes."""

import ctypes
import mmap

import numpy as np
import torch

PAGE = mmap.PAGESIZE
BESIDE = 4096  # bytes of NaN codes on either side
_PROT_NONE = 0
# What reads as NaN, or for e2m1, which has none, as 6.
CODES = {
    torch.uint8: 0xFF,
    torch.float8_e4m3fn: 0x7F,
    torch.bfloat16: 0xFF,
    torch.float32: 0xFF,
    "e2m1": 0x77,
}


def _numbers(tensor):
    return tensor.contiguous().view(torch.uint8).flatten()


def beside_codes(tensor, code=None):
    """The same tensor between NaN codes."""
    code = CODES[tensor.dtype] if code is None else code
    whole = torch.full((tensor.nbytes + 2 * BESIDE,), code, dtype=torch.uint8, device=tensor.device)
    inside = whole[BESIDE : BESIDE + tensor.nbytes]
    inside.copy_(_numbers(tensor))
    return inside.view(tensor.dtype).view(tensor.shape)


class Walls:
    """Memory whose last byte lies before a page that kills who reads it; so does its first, to a
    page. Keeps what it maps.
    """

    def __init__(self):
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._kept = []

    def __call__(self, tensor):
        room = -(-tensor.nbytes // PAGE) * PAGE
        memory = mmap.mmap(-1, room + 2 * PAGE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        for wall in (start, start + PAGE + room):
            refused = self._libc.mprotect(ctypes.c_void_p(wall), PAGE, _PROT_NONE)
            assert not refused, ctypes.get_errno()
        at = PAGE + room - tensor.nbytes
        inside = np.frombuffer(memory, np.uint8, tensor.nbytes, at)
        inside[:] = _numbers(tensor).numpy()
        self._kept.append(memory)
        return torch.from_numpy(inside).view(tensor.dtype).view(tensor.shape)
