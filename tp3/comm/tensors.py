"""From a user's tensor to flat contiguous data and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def flat(tensor: Tensor, view: torch.dtype = torch.uint8) -> Tensor:
    """The elements in row-major order, viewed as ``view``; the tensor's own memory if it can."""
    dense = tensor.detach()
    if not dense.is_contiguous() or dense.is_conj() or dense.is_neg():
        dense = dense.resolve_conj().resolve_neg().contiguous()
    if dense.stride() != (1,):  # not view(-1), which keeps odd strides of a single element
        dense = dense.as_strided((dense.numel(),), (1,))
    return dense if dense.dtype is view else dense.view(view)


def copy_back(tensor: Tensor, data: Tensor) -> None:
    """Bring ``data``, made of ``tensor``, into it, unless it is the tensor's own memory."""
    if data.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(data.view(tensor.dtype).view(tensor.shape))


def chunks(data: Tensor, numel: int) -> Sequence[Tensor]:
    """Flat ``data`` in pieces of at most ``numel``; none of nothing."""
    if 0 < data.numel() <= numel:
        return (data,)
    return torch.split(data, numel) if data.numel() else ()


def describe(tensor: Tensor) -> str:
    """Dtype and shape: ``float32[4, 1024]``."""
    return f"{str(tensor.dtype)[6:]}{list(tensor.shape)}"
