"""A Transformers folder as a lazy stream: `model.safetensors`, or the shards its index names.

Every file's header is checked before the first tensor is read, so that a truncated or absent shard
is an error of one sentence at the start and not in the middle of a load. Tensors are mapped from
the file, read when touched.
"""

from collections.abc import Iterator
from os import PathLike

from safetensors import safe_open
from torch import Tensor

from tp3.pad.headers import Header, read_headers


def read_weights(folder: str | PathLike[str]) -> Iterator[tuple[str, Tensor]]:
    """`(name, tensor)` of every tensor in the folder, shard by shard."""
    return _stream(read_headers(folder))


def _stream(headers: list[Header]) -> Iterator[tuple[str, Tensor]]:
    for header in headers:
        with safe_open(header.file, framework="pt") as handle:
            for name in header.tensors:
                yield name, handle.get_tensor(name)
