"""What a launcher does with its arguments: check them, take addresses, start the kernel."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from tp3.kernels.launch import INTERPRETED, Kept
from tp3.kernels.tiles import Tile

E4M3 = torch.float8_e4m3fn
VECTOR_BYTES = 16

Argument = torch.Tensor | int | None
# Kernel, constants, warps and device → compiled. Registers and spills are read from here.
KEPT: dict[tuple[Any, Hashable, int, torch.device], Kept] = {}


def check(
    name: str,
    tensor: torch.Tensor,
    dtypes: Sequence[torch.dtype],
    shape: Sequence[int | None],
) -> None:
    """Errors: ValueError for another dtype or shape (None: any size), or memory of no use."""
    if tensor.dtype not in dtypes:
        allowed = " or ".join(map(str, dtypes))
        raise ValueError(f"{name} is {tensor.dtype}; allowed: {allowed}")
    got = list(tensor.shape)
    if len(got) != len(shape) or any(w is not None and g != w for g, w in zip(got, shape)):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} has shape {got}; allowed: [{wanted}]")
    if (tensor.device.type == "cpu") != INTERPRETED:
        wanted = "cpu, with TRITON_INTERPRET=1" if INTERPRETED else "a GPU"
        raise ValueError(f"{name} is on {tensor.device}; allowed: {wanted}")


def check_scaled(x: torch.Tensor, x_scale: torch.Tensor | None) -> None:
    """Errors: ValueError unless x has a scale just where it is e4m3."""
    if (x.dtype == E4M3) != (x_scale is not None):
        has = "without" if x_scale is None else "with"
        raise ValueError(f"x is {x.dtype} {has} x_scale; allowed: a scale with e4m3 only")


def same_device(**tensors: torch.Tensor | None) -> None:
    """Errors: ValueError where a tensor is not with the first."""
    first: tuple[str, torch.device] | None = None
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        first = first or (name, tensor.device)
        if tensor.device != first[1]:
            raise ValueError(f"{name} is on {tensor.device}; allowed: {first[1]}, as {first[0]}")


def fixed(name: str, tensor: torch.Tensor, align: int = VECTOR_BYTES) -> torch.Tensor:
    """The tensor, which must lie as the kernel reads it: weights are not copied in silence."""
    if not tensor.is_contiguous():
        raise ValueError(f"{name} has strides {tensor.stride()}; allowed: a contiguous tensor")
    if tensor.data_ptr() % align:
        raise ValueError(
            f"{name} starts at an address that is {tensor.data_ptr() % align} modulo {align}; "
            f"allowed: a multiple of {align}"
        )
    return tensor


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy where its rows do not start at multiples of 16 bytes."""
    strides = [stride * x.element_size() for stride in x.stride()[:-1]]
    aligned = all(stride % VECTOR_BYTES == 0 for stride in (*strides, x.data_ptr()))
    return x if aligned and x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)


@functools.cache
def target_of(device: torch.device) -> str:
    """TARGET of the kernels."""
    if INTERPRETED:
        return "interpret"
    if torch.version.hip is None:
        return "cuda"
    name = torch.cuda.get_device_properties(device).gcnArchName
    return "gfx12" if name.startswith("gfx12") else "gfx9"


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    """Of an NVIDIA GPU, else 0."""
    if INTERPRETED or torch.version.hip is not None:
        return (0, 0)
    return torch.cuda.get_device_capability(device)


def starts_early(device: torch.device) -> bool:
    """Whether a kernel can start while the one before it ends."""
    return _capability(device) >= (9, 0)


def multiplies_pairs(device: torch.device) -> bool:
    """Whether an instruction multiplies two bf16 by two others."""
    return _capability(device) >= (9, 0)


def multiplies_e4m3(device: torch.device) -> bool:
    """Whether Triton multiplies e4m3 as such there."""
    return _capability(device) >= (8, 9)


def _kept(
    kernel: Any,
    constants: dict[str, Hashable],
    num_args: int,
    warps: int,
    device: torch.device,
    early: bool,
) -> Kept:
    key = kernel, tuple(constants.items()), warps, device
    if key not in KEPT:
        KEPT[key] = Kept(kernel, constants, num_args=num_args, num_warps=warps, early=early)
    return KEPT[key]


def start(
    kernel: Any,
    tile: Tile | int,
    device: torch.device,
    grid: tuple[int, int],
    args: Sequence[Argument],
    early: bool = False,
    **constants: Hashable,
) -> None:
    """Start a kernel on the current stream. tile: or a number of warps, of a kernel without one.
    early: as in ``Kept``.
    """
    warps = tile
    if isinstance(tile, Tile):
        warps, constants = tile.warps, {**constants, **tile.constants}
    numbers = [_number(arg) for arg in args]
    if INTERPRETED:
        _kept(kernel, constants, len(args), warps, device, early)(grid, numbers, 0)
        return
    with torch.cuda.device(device):
        kept = _kept(kernel, constants, len(args), warps, device, early)
        kept(grid, numbers, torch.cuda.current_stream(device).cuda_stream)


def _number(argument: Argument) -> int:
    if argument is None:
        return 0
    return argument.data_ptr() if isinstance(argument, torch.Tensor) else argument
