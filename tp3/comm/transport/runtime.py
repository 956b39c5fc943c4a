"""The CUDA or HIP runtime that torch has loaded, by ctypes: memory that other processes may map.

Not torch's allocator: what that hands out may lie in expandable segments, which no handle can
share, and a handle would export the whole segment. Sources: CUDA Runtime API and HIP documentation.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import POINTER, byref, c_int, c_size_t, c_uint, c_void_p
from dataclasses import dataclass

from tp3.comm.errors import R4DError

HANDLE_BYTES = 64
_GRANULE = 2 << 20
_LAZY_PEER_ACCESS = 1
_UNCACHED = 3  # hipDeviceMallocUncached
_RELAXED = 2
_HOST_TO_DEVICE = 1
_NON_BLOCKING = 1
_REMEDY = {
    "cudaErrorInvalidValue": "in a container, share the host's IPC and pid namespaces "
    "(--ipc=host --pid=host)",
    "cudaErrorInvalidResourceHandle": "in a container, share the host's IPC and pid namespaces "
    "(--ipc=host --pid=host)",
    "cudaErrorPeerAccessUnsupported": "these GPUs cannot reach each other's memory",
    "cudaErrorMemoryAllocation": "leave more device memory free",
}


class _Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * HANDLE_BYTES)]


@dataclass(frozen=True)
class Runtime:
    """The calls that r4d needs. Addresses are ints. Errors: R4DError names the call and why."""

    library: ctypes.CDLL
    prefix: str

    def malloc(self, nbytes: int, *, uncached: bool = False) -> int:
        """Memory of the current device. uncached: on HIP, not held in any cache."""
        size, pointer = c_size_t(-(-nbytes // _GRANULE) * _GRANULE), c_void_p()
        if uncached and self.prefix == "hip":
            self._call("ExtMallocWithFlags", byref(pointer), size, c_uint(_UNCACHED))
        else:
            self._call("Malloc", byref(pointer), size)
        assert pointer.value is not None
        return pointer.value

    def free(self, address: int) -> None:
        self._call("Free", c_void_p(address))

    def new_stream(self) -> int:
        """A stream of the current device that does not wait for the default one."""
        pointer = c_void_p()
        self._call("StreamCreateWithFlags", byref(pointer), c_uint(_NON_BLOCKING))
        assert pointer.value is not None
        return pointer.value

    def fill(self, address: int, byte: int, nbytes: int, stream: int) -> None:
        """On a stream."""
        self._call(
            "MemsetAsync", c_void_p(address), c_int(byte), c_size_t(nbytes), c_void_p(stream)
        )

    def write(self, address: int, data: bytes, stream: int) -> None:
        """On a stream; ``data`` may be gone afterwards."""
        size, kind = c_size_t(len(data)), c_int(_HOST_TO_DEVICE)
        self._call("MemcpyAsync", c_void_p(address), data, size, kind, c_void_p(stream))
        self._call("StreamSynchronize", c_void_p(stream))

    def export(self, address: int) -> bytes:
        """What another process needs to map this memory."""
        handle = _Handle()
        self._call("IpcGetMemHandle", byref(handle), c_void_p(address))
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        """Map another process's memory (never one's own) into the current device."""
        pointer = c_void_p()
        self._call(
            "IpcOpenMemHandle",
            byref(pointer),
            _Handle.from_buffer_copy(handle),
            c_uint(_LAZY_PEER_ACCESS),
        )
        assert pointer.value is not None
        return pointer.value

    def close(self, address: int) -> None:
        """Undo ``open``."""
        self._call("IpcCloseMemHandle", c_void_p(address))

    @contextmanager
    def relaxed(self) -> Iterator[None]:
        """Allow loading and allocation on this thread while a stream is captured."""
        mode = c_int(_RELAXED)
        self._call("ThreadExchangeStreamCaptureMode", byref(mode))
        try:
            yield
        finally:
            self._call("ThreadExchangeStreamCaptureMode", byref(mode))

    def _call(self, name: str, *args: object) -> None:
        code = self.library[self.prefix + name](*args)
        if code == 0:
            return
        self.library[self.prefix + "GetLastError"]()  # or torch would report it as its own
        get_name = self.library[self.prefix + "GetErrorName"]
        get_name.restype = ctypes.c_char_p
        text = (get_name(c_int(code)) or b"unknown").decode()
        remedy = _REMEDY.get(text.replace("hip", "cuda", 1), "")
        raise R4DError(
            f"r4d: {self.prefix}{name} failed: {text} ({code})" + (f"; {remedy}" if remedy else "")
        )


@functools.cache
def runtime() -> Runtime:
    """The runtime of this process: torch must have initialised its device before."""
    path, prefix = _loaded()
    library = ctypes.CDLL(path)
    library[prefix + "IpcOpenMemHandle"].argtypes = [POINTER(c_void_p), _Handle, c_uint]
    return Runtime(library, prefix)


def _loaded() -> tuple[str, str]:
    with open("/proc/self/maps", encoding="utf-8") as maps:
        paths = {line.split(None, 5)[5].strip() for line in maps if "/" in line}
    for name, prefix in (("libcudart", "cuda"), ("libamdhip64", "hip")):
        for path in sorted(paths):
            if path.rpartition("/")[2].startswith(name):
                return path, prefix
    raise R4DError("r4d: torch has loaded neither libcudart nor libamdhip64; it needs a GPU build")
