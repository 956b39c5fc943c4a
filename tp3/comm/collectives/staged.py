"""Collectives of device tensors through host memory: for what no kernel takes, and for ranks that
cannot share device memory. Each call waits for the device, so none can be captured in a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from tp3.comm.errors import R4DError
from tp3.comm.reduce import Reduction
from tp3.comm.tensors import write


class Host(Protocol):
    """What runs a collective on host arrays."""

    def run_on_host(self, args: list[Any]) -> None: ...


def _staged(collective: str, host: Host, *args: Any) -> None:
    """Run the host's algorithm on copies; the first argument is what the collective writes."""
    if torch.cuda.is_current_stream_capturing():
        raise R4DError(
            f"r4d: this {collective} goes through host memory and cannot be captured in a graph"
        )
    storage = next((arg.storage for arg in args if isinstance(arg, Reduction)), torch.uint8)
    copies = [_to_host(arg, storage) for arg in args]
    host.run_on_host(copies)
    _to_device(args[0], copies[0])


def _to_host(arg: Any, storage: torch.dtype) -> Any:
    if isinstance(arg, Tensor):
        return arg.cpu().view(storage).numpy()
    if isinstance(arg, list | tuple) and arg and isinstance(arg[0], Tensor):
        return [_to_host(part, storage) for part in arg]
    return arg


def _to_device(target: Any, result: Any) -> None:
    if isinstance(target, Tensor):
        write(target, torch.from_numpy(result).view(target.dtype))
    elif target is not None:
        for part, data in zip(target, result, strict=True):
            _to_device(part, data)


all_reduce: Callable[..., None] = partial(_staged, "all_reduce")
reduce: Callable[..., None] = partial(_staged, "reduce")
reduce_scatter: Callable[..., None] = partial(_staged, "reduce_scatter")
broadcast: Callable[..., None] = partial(_staged, "broadcast")
all_gather: Callable[..., None] = partial(_staged, "all_gather")
gather: Callable[..., None] = partial(_staged, "gather")
scatter: Callable[..., None] = partial(_staged, "scatter")
all_to_all: Callable[..., None] = partial(_staged, "all_to_all")
