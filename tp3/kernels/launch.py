"""Launching: a kernel is compiled once for its constants, kept, and started past Triton's search.

The runtime arguments of our kernels are 64-bit integers (addresses, counts, times) that Triton does
not specialise on, so one compiled kernel serves every call with the same constants. On an H200,
Triton's own launch costs 4-10 µs of host time, this one 1-2 µs (facts measured in 2026-11).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"


def _on_nvidia() -> bool:
    import torch

    return torch.version.hip is None


class Kept:
    """A kernel with its constants.

    grid: blocks in x and y. stream: its raw handle. early: an NVIDIA GPU starts the kernel while
    the one before it ends, for which it waits by ``gdc_wait`` (CUDA's programmatic dependent
    launch). Errors: what Triton raises.
    """

    def __init__(
        self,
        kernel: Any,
        constants: Mapping[str, Any],
        *,
        num_args: int,
        num_warps: int,
        max_registers: int | None = None,
        early: bool = False,
    ) -> None:
        self.num_warps = num_warps
        self._kernel = kernel
        self._options = dict(constants)
        names = kernel.arg_names[num_args:]
        assert set(names) == set(constants), set(names) ^ set(constants)
        self._constants = tuple(constants[name] for name in names)
        self._compiled: Any = None
        if not INTERPRETED:
            options: dict[str, Any] = {}
            if _on_nvidia():
                options = {"maxnreg": max_registers, "launch_pdl": early}
            self._compiled = kernel.warmup(
                *[0] * num_args,
                grid=(1,),
                num_warps=num_warps,
                enable_fp_fusion=False,
                **options,
                **constants,
            )
            self._run = self._compiled.run  # loads the module
            self._function = self._compiled.function
            self._metadata = self._compiled.packed_metadata

    @property
    def registers(self) -> int:
        """32-bit registers per thread."""
        return 0 if self._compiled is None else int(self._compiled.n_regs)

    @property
    def spills(self) -> int:
        return 0 if self._compiled is None else int(self._compiled.n_spills)

    def __call__(self, grid: tuple[int, int], args: Sequence[int], stream: int) -> None:
        if self._compiled is None:
            self._kernel[(*grid, 1)](*args, **self._options)
            return
        self._run(
            grid[0], grid[1], 1, stream, self._function, self._metadata, None, None, None,
            *args, *self._constants,
        )  # fmt: skip
