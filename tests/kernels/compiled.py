"""Kernels compiled for GPUs that are not here, with the constants and options of the launchers."""

import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.kernels.assembly import GFX9, GFX12, PTX, Dialect
from tests.kernels.interpreted import KERNELS, start_sum
from tp3.comm.layout import DeviceLayout
from tp3.comm.transport import device_kernels as kernels

LAUNCHERS = [*KERNELS, "exchange", "exchange-table"]
CUOBJDUMP = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"


@dataclass(frozen=True)
class Target:
    gpu: GPUTarget
    code: str  # TARGET of the kernels
    stage: str
    dialect: Dialect


TARGETS = {
    "sm_90": Target(GPUTarget("cuda", 90, 32), "cuda", "ptx", PTX),
    "gfx1201": Target(GPUTarget("hip", "gfx1201", 32), "gfx12", "amdgcn", GFX12),
    "gfx942": Target(GPUTarget("hip", "gfx942", 64), "gfx9", "amdgcn", GFX9),
    "gfx950": Target(GPUTarget("hip", "gfx950", 64), "gfx9", "amdgcn", GFX9),
}
# Of NVIDIA, and not of those that shapes and tiles were measured on.
OTHERS = {
    f"sm_{number}": Target(GPUTarget("cuda", number, 32), "cuda", "ptx", PTX)
    for number in (80, 86, 89, 120)
}


class Recorder:
    """Stands in for ``DeviceTransport`` and ``Kept``: what a launcher would start."""

    rank = 1

    def __init__(self, world_size: int, target: str) -> None:
        self.world_size, self.layout = world_size, DeviceLayout(world_size)
        self.target = target
        self.asked: tuple[int, int] = (0, 0)
        self.made: tuple[Any, dict[str, Any], int, int | None] | None = None

    def room(self, threads: int, registers: int) -> int:
        self.asked = threads, registers
        return 64

    def kernel(self, key: Any, make: Callable[[], None]) -> None:
        make()

    def keep(
        self, kernel: Any, constants: dict[str, Any], *, num_args: int, num_warps: int,
        max_registers: int | None = None,
    ) -> None:  # fmt: skip
        self.made = kernel, constants, num_warps, max_registers

    def start(self, *args: Any, page: str = "") -> None:
        """Nothing runs."""

    start_with_table = start


def launched(recorder: Recorder, launcher: str, dtype: torch.dtype, op: str, align: int) -> None:
    if launcher == "exchange":
        kernels.exchange(recorder, num_bytes=align, lanes=(0, 1))
    elif launcher == "exchange-table":
        rows = [(align, align)] * recorder.world_size
        kernels.exchange_table(recorder, rows, rows)
    else:
        some = torch.zeros(64, dtype=dtype)
        start_sum(recorder, launcher, some, some, op)


@dataclass(frozen=True)
class Compiled:
    text: str
    dialect: Dialect
    threads: int
    asked: tuple[int, int]  # threads and registers of a block, as the grid was computed
    constants: dict[str, Any]
    binary: Any

    def usage(self, folder: Path) -> tuple[int, int]:
        """Registers of a thread, and the bytes of its stack (spills), of an NVIDIA kernel."""
        path = folder / "kernel.cubin"
        path.write_bytes(self.binary)
        command = [str(CUOBJDUMP), "-res-usage", str(path)]
        told = subprocess.run(command, capture_output=True, text=True, check=True)
        found = re.search(r"REG:(\d+) STACK:(\d+)", told.stdout + told.stderr)
        assert found, told.stdout + told.stderr
        return int(found[1]), int(found[2])


def source_of(kernel: Any, constants: dict[str, Any]) -> ASTSource:
    """A kernel with its constants, all other arguments being 64-bit integers."""
    names = kernel.arg_names
    return ASTSource(
        fn=kernel,
        signature={name: "constexpr" if name in constants else "i64" for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={},
    )


def compiled(
    launcher: str, target: str, world_size: int = 3, dtype: torch.dtype = torch.bfloat16,
    op: str = "SUM", align: int = 16,
) -> Compiled:  # fmt: skip
    to = (TARGETS | OTHERS)[target]
    recorder = Recorder(world_size, to.code)
    before, kernels.Kept = kernels.Kept, recorder.keep
    try:
        launched(recorder, launcher, dtype, op, align)
    finally:
        kernels.Kept = before
    assert recorder.made is not None
    kernel, constants, num_warps, max_registers = recorder.made
    options: dict[str, Any] = {"num_warps": num_warps, "enable_fp_fusion": False}
    if max_registers and to.code == "cuda":
        options["maxnreg"] = max_registers
    made = triton.compile(source_of(kernel, constants), target=to.gpu, options=options)
    threads = num_warps * to.gpu.warp_size
    binary = made.asm["cubin"] if to.code == "cuda" else None
    return Compiled(made.asm[to.stage], to.dialect, threads, recorder.asked, constants, binary)
