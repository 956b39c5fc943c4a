"""The headers of safetensors files, read without torch and without touching a weight.

A file is eight bytes of length (little-endian), that many bytes of JSON, then the data. The JSON
gives for each tensor ``dtype``, ``shape`` and ``data_offsets`` from the start of the data, which
tensors fill without gap or overlap. Source: the format's description at
https://huggingface.co/docs/safetensors. A damaged file is a ValueError of one sentence.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MOST_HEADER_BYTES = 100_000_000  # the format's own limit

BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}


class Stored(NamedTuple):
    """A tensor in a file; ``begin`` and ``end`` in bytes from the start of the data."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Header:
    """What a file holds, in the order of its data. data_at: bytes before the data."""

    file: Path
    tensors: dict[str, Stored]
    metadata: dict[str, str]
    data_at: int


def num_bytes(dtype: str, shape: Iterable[int]) -> int:
    """Bytes of a tensor's data. Errors: ValueError for a dtype that safetensors does not have."""
    bits = BITS.get(dtype)
    if bits is None:
        raise ValueError(f"dtype must be one of {', '.join(BITS)}, got {dtype!r}")
    return -(-prod(shape) * bits // 8)


def read_header(file: str | PathLike[str]) -> Header:
    """The header of one file, checked against the file's length."""
    path = Path(file)
    try:
        with path.open("rb") as handle:
            total = os.fstat(handle.fileno()).st_size
            length = int.from_bytes(handle.read(8), "little")
            if total < 8 or not 2 <= length <= min(total - 8, MOST_HEADER_BYTES):
                raise ValueError(
                    f"{path} is not a whole safetensors file: "
                    f"its header of {length} bytes does not fit in {total} bytes"
                )
            text = handle.read(length)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    try:
        values = json.loads(text)
        metadata = dict(values.pop("__metadata__", None) or {})
        found = [(name, _stored(value)) for name, value in values.items()]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{path} is not a whole safetensors file: its header is not one"
        ) from error
    found.sort(key=lambda item: (item[1].begin, item[1].end))
    _check(path, found, total - 8 - length)
    return Header(path, dict(found), metadata, 8 + length)


def read_headers(folder: str | PathLike[str]) -> list[Header]:
    """The headers of ``model.safetensors``, or of the shards that the index names, in its order.

    Errors: ValueError for a folder with neither, a shard that is absent or damaged, a tensor that
    is in two shards or not in the one that the index says.
    """
    root = Path(folder)
    if not root.is_dir():
        raise ValueError(f"{folder} is not a folder")
    if (root / SINGLE).exists():
        return [read_header(root / SINGLE)]
    if not (root / INDEX).exists():
        raise ValueError(f"{root} has neither {SINGLE} nor {INDEX}")
    placed = read_index(root)["weight_map"]
    headers = {}
    for file in dict.fromkeys(placed.values()):
        if not (root / file).exists():
            raise ValueError(f"{root / file} does not exist, but {INDEX} names it")
        headers[file] = read_header(root / file)
    for name, file in placed.items():
        if name not in headers[file].tensors:
            raise ValueError(f"{root / file} lacks the tensor {name} that {INDEX} places there")
    seen: dict[str, str] = {}
    for file, header in headers.items():
        for name in header.tensors:
            if name in seen:
                raise ValueError(f"tensor {name} is in {seen[name]} and in {file}")
            seen[name] = file
    return list(headers.values())


def read_index(root: Path) -> dict[str, Any]:
    """The index of a sharded folder; ``weight_map`` is checked, the rest as it stands."""
    file = root / INDEX
    try:
        index: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        placed = index["weight_map"]
        shards = set(placed.values())
        fine = bool(shards) and all(isinstance(shard, str) for shard in shards)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} must be JSON with an object weight_map") from error
    if not fine:
        raise ValueError(f"{file} must be JSON with an object weight_map of file names")
    outside = next((s for s in sorted(shards) if Path(s).name != s), None)
    if outside is not None:
        raise ValueError(f"{file} must name files of its own folder, got {outside!r}")
    return index


def encode_header(tensors: dict[str, Stored], metadata: dict[str, str]) -> bytes:
    """The first bytes of a file; spaces make the data begin at a multiple of eight."""
    values: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    for name, (dtype, shape, begin, end) in tensors.items():
        values[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(values, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _stored(value: dict[str, Any]) -> Stored:
    begin, end = value["data_offsets"]
    shape, dtype = tuple(value["shape"]), value["dtype"]
    if not isinstance(dtype, str):
        raise TypeError(dtype)
    for number in (begin, end, *shape):
        if type(number) is not int or number < 0:
            raise TypeError(number)
    return Stored(dtype, shape, begin, end)


def _check(path: Path, found: list[tuple[str, Stored]], data_bytes: int) -> None:
    at = 0
    lengths: dict[tuple[str, tuple[int, ...]], int] = {}
    for name, stored in found:
        length = lengths.get(stored[:2])
        if length is None:
            try:
                length = lengths[stored[:2]] = num_bytes(stored.dtype, stored.shape)
            except ValueError as error:
                raise ValueError(f"{path}, tensor {name}: {error}") from error
        if stored.begin != at or stored.end != at + length:
            raise ValueError(
                f"{path}, tensor {name} takes bytes {stored.begin} to {stored.end}, "
                f"expected {at} to {at + length}"
            )
        at = stored.end
    if at != data_bytes:
        raise ValueError(
            f"{path} is not a whole safetensors file: "
            f"its tensors take {at} bytes, the file has {data_bytes}"
        )
