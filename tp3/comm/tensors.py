"""From a user's tensor to a flat array of its memory, and back.

Data move as numpy arrays: a slice of one costs a tenth of a tensor's, which counts in calls of a
few microseconds, and writing through one asks nothing of autograd or inference mode, as in Gloo
and NCCL.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[Any]


def flat(tensor: Tensor, storage: torch.dtype = torch.uint8) -> Array:
    """The elements in row-major order as ``storage``; the tensor's own memory where it is dense."""
    dense = tensor.detach()
    if not dense.is_contiguous() or dense.is_conj() or dense.is_neg():
        dense = dense.resolve_conj().resolve_neg().contiguous()
    if dense.stride() != (1,):  # not view(-1), which keeps odd strides of a single element
        dense = dense.as_strided((dense.numel(),), (1,))
    array: Array = (dense if dense.dtype is storage else dense.view(storage)).numpy()
    return array


def copy_back(tensor: Tensor, data: Array) -> None:
    """Bring ``data``, made of ``tensor``, into it, unless it is the tensor's own memory."""
    if not data.size or data.__array_interface__["data"][0] == tensor.data_ptr():
        return
    source = torch.from_numpy(data).view(tensor.dtype).view(tensor.shape)
    with torch.inference_mode(tensor.is_inference()):
        tensor.detach().copy_(source)


def chunks(data: Array, size: int) -> Iterator[Array]:
    """Flat ``data`` in pieces of at most ``size`` elements."""
    for start in range(0, data.size, size):
        yield data[start : start + size]


def describe(tensor: Tensor) -> str:
    """Dtype and shape: ``float32[4, 1024]``."""
    return f"{str(tensor.dtype)[6:]}{list(tensor.shape)}"
