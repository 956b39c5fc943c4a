"""r4d's device half, all of it, where there is no GPU: "device memory" is files, kernels are
interpreted and have ended when they have been started, streams are in order by that.

Only what touches CUDA is replaced; what connects, starts, watches and ends is the real code. A
message may not be longer than its ring (``interpreted``), nor may both ranks receive first.
"""

import ctypes
import mmap
import os
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

from tests.kernels.interpreted import address_of, attach, device_kernels, layout_of
from tp3.comm.group import Group

DEVICE = torch.device("cpu", 0)
PROBE_BYTES = 64 << 10  # a chunk


class Runtime:
    """What ``transport.runtime`` does, on files. Everything opened or made must be let go."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.made: dict[int, tuple[mmap.mmap, Path]] = {}
        self.opened: dict[int, mmap.mmap] = {}

    def malloc(self, nbytes, *, uncached=False):
        path = self._folder / f"{os.getpid()}-{len(self.made)}"
        path.write_bytes(b"\x5a" * nbytes)  # nothing is zero by itself
        memory = attach(path, nbytes)
        self.made[address_of(memory)] = memory, path
        return address_of(memory)

    def export(self, address):
        return str(self.made[address][1]).encode()

    def open(self, handle):
        path = Path(handle.decode())
        memory = attach(path, path.stat().st_size)
        self.opened[address_of(memory)] = memory
        return address_of(memory)

    def close(self, address):
        del self.opened[address]

    def free(self, address):
        del self.made[address]

    def fill(self, address, byte, nbytes, stream):
        ctypes.memset(address, byte, nbytes)

    def write(self, address, data, stream):
        ctypes.memmove(address, data, len(data))

    relaxed = staticmethod(nullcontext)


class Stream:
    """Of work that has ended; an event, too."""

    device, cuda_stream = DEVICE, 0

    def query(self):
        return True

    def record_event(self):
        return self

    record = synchronize = wait_stream = wait_event = lambda self, *args: None


class Streams:
    """Counts those that were not given back."""

    def __init__(self):
        self.taken = 0

    def take(self):
        self.taken += 1
        return Stream()

    def give_back(self, streams):
        self.taken -= len(list(streams))

    @contextmanager
    def borrowed(self):
        yield Stream()


class Emulated:
    """One of two ranks of a group whose device half runs on files."""

    def __init__(self, folder: Path, rank: int, world_size: int, timeout: float = 60.0) -> None:
        from tp3.comm import device_queue
        from tp3.comm.transport import device, device_memory, probe

        device_kernels()
        self.rank, self.peer, self.folder = rank, 1 - rank, folder
        self.runtime, self.streams = Runtime(folder), Streams()
        properties = SimpleNamespace(uuid="one", multi_processor_count=132)
        torch.cuda.get_device_properties = lambda which: properties
        torch.cuda.current_stream = lambda which=None: Stream()
        torch.cuda.stream = torch.cuda.device = lambda which: nullcontext()
        torch.cuda.synchronize = lambda which=None: None
        torch.cuda.Event = Stream
        torch.cuda.is_current_stream_capturing = lambda: False
        probe.PROBE_BYTES = PROBE_BYTES
        device_memory.runtime = lambda: self.runtime
        for module in (device_memory, probe, device_queue):
            module.streams_of = lambda which: self.streams
        device.DeviceLayout = layout_of
        device._target = lambda which: "interpret"
        pinned = torch.zeros, torch.empty
        for name, make in zip(("zeros", "empty"), pinned):
            setattr(device.torch, name, _pageable(make))
        store = dist.FileStore(str(folder / "store"), world_size)
        self.group = Group(
            store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout)
        )
        self.side = self.group.device_side(DEVICE)

    def close(self):
        """Errors: AssertionError if anything was kept."""
        self.group.close()
        assert (self.runtime.made, self.runtime.opened, self.streams.taken) == ({}, {}, 0)


def _pageable(make):
    def made(*shape, pin_memory=False, **options):
        return make(*shape, **options)

    return made
