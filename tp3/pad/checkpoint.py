"""A Transformers folder as a lazy stream: `model.safetensors`, or the shards its index names.

Every file's header is checked before the first tensor is read, so that a truncated or absent shard
is an error of one sentence at the start and not in the middle of a load. Tensors are mapped from
the file, read when touched.
"""

import json
from collections.abc import Iterator
from os import PathLike
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def read_weights(folder: str | PathLike[str]) -> Iterator[tuple[str, Tensor]]:
    """`(name, tensor)` of every tensor in the folder, shard by shard."""
    root = Path(folder)
    if not root.is_dir():
        raise ValueError(f"{folder} is not a folder")
    shards = _shards(root)
    for file, names in shards.items():
        missing = next((name for name in names if name not in _names(file)), None)
        if missing is not None:
            raise ValueError(f"{file} lacks the tensor {missing} that {INDEX} places there")
    return _stream(shards)


def _stream(shards: dict[Path, list[str]]) -> Iterator[tuple[str, Tensor]]:
    for file, names in shards.items():
        with safe_open(file, framework="pt") as handle:
            for name in names:
                yield name, handle.get_tensor(name)


def _shards(root: Path) -> dict[Path, list[str]]:
    if (root / SINGLE).exists():
        return {root / SINGLE: _names(root / SINGLE)}
    index = root / INDEX
    if not index.exists():
        raise ValueError(f"{root} has neither {SINGLE} nor {INDEX}")
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        placed = {str(name): root / str(file) for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} must be JSON with an object weight_map") from error
    shards: dict[Path, list[str]] = {}
    for name, file in placed.items():
        shards.setdefault(file, []).append(name)
    return shards


def _names(file: Path) -> list[str]:
    try:
        with safe_open(file, framework="pt") as handle:
            return list(handle.keys())
    except FileNotFoundError as error:
        raise ValueError(f"{file} does not exist, but {INDEX} names it") from error
    except SafetensorError as error:
        raise ValueError(f"{file} is not a whole safetensors file: {error}") from error
