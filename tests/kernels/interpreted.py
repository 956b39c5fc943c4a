"""The real kernels in Triton's interpreter: ranks are processes, their "device memory" is a file.

``Interpreted`` stands in for ``DeviceTransport``: same layout, same constants, host addresses.
The interpreter runs the programs of a launch one after another, so a message of ``exchange`` may
not be longer than its rings. Tiles are small, so that a few KiB make several blocks and rounds.
"""

import ctypes
import mmap
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from tp3.comm.launch import RankFailure, launch
from tp3.comm.layout import DeviceLayout
from tp3.kernels.launch import INTERPRETED, Kept

LIMIT_SECONDS = 10.0  # by the interpreter's clock, which counts turns: about a minute
TURN_SECONDS = 1e-3
MEETING_SECONDS = 60.0
TILE_BYTES = 1 << 10
KERNELS = ["sentinel", "one-shot", "two-shot", "reduce-scatter"]


def layout_of(world_size: int) -> DeviceLayout:
    """Slots of four tiles."""
    return DeviceLayout(world_size, slot_bytes=4 << 10, sentinel_bytes=8 << 10, channels=4)


def device_kernels() -> Any:
    """The module of the launchers, with small blocks whose waits leave the core to others."""
    from tp3.comm.transport import device_kernels as module
    from tp3.kernels import primitives, sentinel

    module.shape_of = lambda algorithm, op, world_size: module.Shape(TILE_BYTES, warps=1)
    if not hasattr(primitives, "spins"):
        primitives.spins = primitives.must_stop
        primitives.must_stop = sentinel.must_stop = _must_stop
    return module


def _must_stop(*args: Any) -> Any:
    from tp3.kernels import primitives

    time.sleep(TURN_SECONDS)
    return primitives.spins(*args)


def start_sum(transport: Any, kernel: str, x: Any, out: Any, op: str = "SUM") -> None:
    """Start a kernel of KERNELS; for "reduce-scatter" x has W parts of the size of out."""
    from tp3.comm.transport import device_kernels as module

    nbytes = out.numel() * out.element_size()
    if kernel == "reduce-scatter":
        module.reduce_scatter_plan(transport, x.dtype, nbytes, nbytes, op).start(x, out)
    else:
        module.all_reduce_plan(transport, kernel, x.dtype, nbytes, op).start(x, out)


def address_of(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def attach(path: Path, nbytes: int) -> mmap.mmap:
    with open(path, "r+b") as file:
        return mmap.mmap(file.fileno(), nbytes)


class Interpreted:
    """One rank's view. folder: where the ranks' memory lies, made by ``create``."""

    target = "interpret"
    device = torch.device("cpu")

    def __init__(self, folder: Path, rank: int, layout: DeviceLayout) -> None:
        assert INTERPRETED, "set TRITON_INTERPRET=1 before triton is imported"
        self.rank, self.world_size, self.layout = rank, layout.world_size, layout
        self.kernels = device_kernels()
        self.max_blocks = 4
        self.limit_seconds = LIMIT_SECONDS
        self.page, self.trial_page = np.zeros(64, np.int32), np.zeros(64, np.int32)
        self._tables: list[Any] = []
        self.memories = [
            (
                attach(folder / f"flags{r}", layout.flag_bytes),
                attach(folder / f"data{r}", layout.data_bytes),
            )
            for r in range(self.world_size)
        ]
        self.flags = address_of(self.memories[rank][0])
        table = np.frombuffer(self.memories[rank][0], np.int64, 2 * self.world_size)
        for r, (flags, data) in enumerate(self.memories):
            table[r], table[self.world_size + r] = address_of(flags), address_of(data)

    @property
    def words(self) -> np.ndarray:
        """This rank's flags as 32-bit words."""
        return np.frombuffer(self.memories[self.rank][0], np.int32)

    def next_tag(self) -> int:
        self._tag = getattr(self, "_tag", 0) + 1
        return self._tag

    def room(self, threads: int, registers: int) -> int:
        """How many blocks a launch may have, alike on all ranks."""
        return self.max_blocks

    def kernel(self, key: Any, make: Callable[[], Kept]) -> Kept:
        return make()

    def start(self, kept: Kept, grid: tuple[int, int], *args: int, page: str = "calls") -> None:
        told = self.trial_page if page == "trial" else self.page
        kept(grid, (self.flags, *args, int(self.limit_seconds * 1e9), told.ctypes.data), 0)

    def start_with_table(
        self, kept: Kept, grid: tuple[int, int], rows: Sequence[int], place: int, *args: int,
        page: str = "calls",
    ) -> None:  # fmt: skip
        table = np.array(rows, np.int64)
        self._tables.append(table)
        self.start(kept, grid, *args[:place], table.ctypes.data, *args[place:], page=page)


def create(folder: Path, layout: DeviceLayout, start: int = 0) -> None:
    """Fresh memory for all ranks: zeros, and ones where the sentinel kernel's slots are.

    start: how many rounds, launches and chunks are over (mod 2**32), alike on all ranks.
    """
    folder.mkdir(exist_ok=True)
    counted = layout.SETS * layout.world_size * layout.channels * 4  # sent … acknowledged
    for rank in range(layout.world_size):
        words = np.zeros(layout.flag_bytes // 4, np.uint32)
        words[layout.LAUNCHES // 4 : layout.channel_words // 4 + counted] = start % 2**32
        words.tofile(folder / f"flags{rank}")
        data = bytearray(layout.data_bytes)
        data[layout.sentinels : layout.rings] = b"\xff" * (layout.rings - layout.sentinels)
        (folder / f"data{rank}").write_bytes(data)


class Interpreter:
    """A process that interprets kernels, and forks one for each rank of a test: importing torch
    costs more than most tests here.
    """

    def __init__(self) -> None:
        self._pool = ProcessPoolExecutor(1, get_context("spawn"))
        with patch.dict(os.environ, TRITON_INTERPRET="1"):
            self._pool.submit(_import)

    def close(self) -> None:
        self._pool.shutdown()

    def ranks(
        self, function: Callable[..., Any], layout: DeviceLayout, folder: Path, *args: Any,
        start: int = 0, expect_dead: Sequence[int] = (),
    ) -> list[Any]:  # fmt: skip
        """``function(rank, world_size, layout, folder, *args)`` on every rank, on fresh memory."""
        create(folder, layout, start)
        forked = self._pool.submit(
            _forked, function, layout.world_size, layout, folder, *args, expect_dead=expect_dead
        )
        return forked.result()

    def alone(self, function: Callable[..., Any], *args: Any) -> Any:
        """``function(*args)`` in one process."""
        return self._pool.submit(_forked, _alone, 1, function, args).result()[0]


def _import() -> None:
    from tests.kernels import elements

    elements.whole()
    device_kernels()


def _forked(
    function: Callable[..., Any], world_size: int, *args: Any, expect_dead: Sequence[int] = ()
) -> list[Any]:
    try:
        return launch(
            function, world_size, *args, init=False, timeout=80.0, expect_dead=expect_dead
        )
    except RankFailure as failure:  # cannot be pickled
        raise AssertionError(str(failure)) from None


def _alone(rank: int, world_size: int, function: Callable[..., Any], args: Sequence[Any]) -> Any:
    return function(*args)


def late(chance: Any, most_seconds: float = 0.03) -> None:
    """Now and then this rank comes late."""
    if chance.random() < 0.3:
        time.sleep(chance.random() * most_seconds)


def meet(folder: Path, rank: int, world_size: int, name: str) -> None:
    """A barrier of ranks that does not use what is under test."""
    (folder / f"{name}-{rank}").touch()
    until(lambda: all((folder / f"{name}-{r}").exists() for r in range(world_size)))


def until(there: Callable[[], bool]) -> None:
    """Wait for what another process does."""
    deadline = time.monotonic() + MEETING_SECONDS
    while not there():
        assert time.monotonic() < deadline, "nobody else came"
        time.sleep(1e-3)
