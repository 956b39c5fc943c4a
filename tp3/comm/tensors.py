"""From a user's tensor to a flat array of its memory, and back.

Data move as numpy arrays: a slice of one costs a tenth of a tensor's, which counts in calls of a
few microseconds, and writing through one asks nothing of autograd or inference mode, as in Gloo
and NCCL.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[Any]


def flat(tensor: Tensor, storage: torch.dtype = torch.uint8) -> Any:
    """The elements in row-major order; the tensor's own memory where it is dense.

    An array of ``storage`` for a CPU tensor. On a device a flat tensor, of its own dtype where
    ``storage`` is as wide: kernels know every dtype.
    """
    dense = tensor.detach()
    if not dense.is_contiguous() or dense.is_conj() or dense.is_neg():
        dense = dense.resolve_conj().resolve_neg().contiguous()
    if dense.stride() != (1,):  # not view(-1), which keeps odd strides of a single element
        dense = dense.as_strided((dense.numel(),), (1,))
    if dense.device.type != "cpu":
        return dense if dense.itemsize == storage.itemsize else dense.view(storage)
    array: Array = (dense if dense.dtype is storage else dense.view(storage)).numpy()
    return array


def copy_back(tensor: Tensor, data: Array | Tensor) -> None:
    """Bring ``data``, made of ``tensor``, into it, unless it is the tensor's own memory."""
    source = data if isinstance(data, Tensor) else torch.from_numpy(data)
    if not source.numel() or source.data_ptr() == tensor.data_ptr():
        return
    write(tensor.detach(), source.view(tensor.dtype).view(tensor.shape))


def write(target: Tensor, source: Tensor) -> None:
    """Copy, also into what inference mode has made."""
    with torch.inference_mode(target.is_inference()):
        target.copy_(source)


def chunks(data: Array, size: int) -> Iterator[Array]:
    """Flat ``data`` in pieces of at most ``size`` elements."""
    for start in range(0, data.size, size):
        yield data[start : start + size]


def is_dense_vectors(tensor: Tensor) -> bool:
    """Whether a tensor is contiguous, and made of whole 16-byte vectors at their alignment."""
    if tensor.layout is not torch.strided or not tensor.is_contiguous():
        return False
    return not (tensor.data_ptr() | tensor.numel() * tensor.element_size()) & 15


def one_device(tensors: Sequence[Tensor]) -> torch.device | None:
    """The device of all ``tensors``, None for the CPU. Errors: ValueError when they differ."""
    if not tensors:
        return None
    device = tensors[0].device
    for tensor in tensors:
        if tensor.device != device:
            raise ValueError(
                f"r4d: a call got tensors on {device} and {tensor.device}; use one device"
            )
    return None if device.type == "cpu" else device


def describe(tensor: Tensor) -> str:
    """Dtype and shape: ``float32[4, 1024]``."""
    return f"{str(tensor.dtype)[6:]}{list(tensor.shape)}"
