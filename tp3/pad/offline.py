"""A padded copy of a checkpoint folder: ``pad_checkpoint(SRC, DST, config, plan)``.

What the plan leaves alone is hard-linked, or copied where DST is on another filesystem. DST appears
whole or not at all: it grows as ``DST.partial`` and is renamed at the end. A run that was
interrupted, at whatever point, leaves SRC as it was; the same call goes on where it stopped,
because a file gets its name in DST.partial only once it is whole.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from tp3.pad.catalogue import Entry
from tp3.pad.check import check
from tp3.pad.headers import (
    INDEX,
    Header,
    Stored,
    encode_header,
    num_bytes,
    read_headers,
    read_index,
)
from tp3.pad.planner import Plan
from tp3.pad.staging import check_space, claimed, files_beside, link, unfinished, write_json
from tp3.pad.standin import stand_in

STATE = ".tp3-pad.json"

Progress = Callable[[int, int], None]  # bytes done, of how many


@dataclass(frozen=True)
class Rewrite:
    """A file to write anew: where its tensors are, and where they go, in the same order."""

    header: Header
    padded: Mapping[str, Stored]

    @property
    def name(self) -> str:
        return self.header.file.name

    @property
    def head(self) -> bytes:
        return encode_header(dict(self.padded), self.header.metadata)

    @property
    def data_bytes(self) -> int:
        return max((stored.end for stored in self.padded.values()), default=0)

    @property
    def num_bytes(self) -> int:
        return len(self.head) + self.data_bytes


@dataclass(frozen=True)
class Padded:
    """What was done, in numbers of files. left_out: other weights of SRC."""

    written: int
    linked: int
    resumed: int
    left_out: tuple[str, ...]
    lines: tuple[str, ...]


def pad_checkpoint(
    src: str | PathLike[str],
    dst: str | PathLike[str],
    config: Mapping[str, Any],
    planned: Plan,
    *,
    progress: Progress = lambda done, total: None,
) -> Padded:
    """Writes the checkpoint in ``src``, whose config is ``config``, to ``dst`` as planned.

    Errors, all before anything is written: ValueError for a DST that exists, a SRC that is no
    checkpoint, is padded already or does not fit the plan, a DST.partial of another run, too little
    free space.
    """
    source, target = Path(src), Path(dst)
    partial = target.with_name(target.name + ".partial")
    _look(source, target, config)
    headers = read_headers(source)
    checked = check(headers, planned)
    checked.require()
    touched = [h for h in headers if not all(checked.entries[name].inert for name in h.tensors)]
    rewrites = [_laid_out(header, checked.entries) for header in touched]
    along, left_out = files_beside(source, {header.file.name for header in headers})
    renewed = {"config.json" if not planned.inert else "", INDEX if rewrites else ""}
    links = [name for name in along if name not in renewed]
    links += [header.file.name for header in headers if header not in touched]
    state = _state(headers, config, planned)
    _refuse_other_run(partial, state)
    todo = [rewrite for rewrite in rewrites if not (partial / rewrite.name).exists()]
    needed = sum(rewrite.num_bytes for rewrite in todo)
    check_space(target.parent, needed + _copied_bytes(source, links, partial), partial)

    with claimed(partial):
        write_json(partial / STATE, state)
        for name in links:
            link(source / name, partial / name)
        total = sum(rewrite.num_bytes for rewrite in rewrites)
        done = total - needed
        progress(done, total)
        for rewrite in todo:
            for written in _write(rewrite, checked.entries, partial / rewrite.name):
                done += written
                progress(done, total)
        if not planned.inert:
            write_json(partial / "config.json", stand_in(planned.padded_config(config)))
        if rewrites and (source / INDEX).exists():
            write_json(partial / INDEX, _padded_index(read_index(source), headers, rewrites))
        if target.exists():
            raise ValueError(f"{target} appeared meanwhile; {partial} is whole, rename it")
        os.rename(partial, target)
        (target / STATE).unlink()
    resumed = len(rewrites) - len(todo)
    return Padded(len(todo), len(links), resumed, tuple(left_out), checked.lines)


def _look(source: Path, target: Path, config: Mapping[str, Any]) -> None:
    if not source.is_dir():
        raise ValueError(f"{source} is not a folder")
    if target.exists() or target.is_symlink():
        raise ValueError(f"{target} exists already; choose another name or remove it")
    if not target.parent.is_dir():
        raise ValueError(f"{target.parent} is not a folder")
    if source.resolve() in target.resolve().parents:
        raise ValueError(f"{target} lies in {source}, which must stay as it is")
    if "tp3" in config:
        raise ValueError(f"{source} is padded already; pad the checkpoint that it was made from")


def _laid_out(header: Header, entries: Mapping[str, Entry]) -> Rewrite:
    padded, at = {}, 0
    for name, stored in header.tensors.items():
        shape = entries[name].padded
        end = at + num_bytes(stored.dtype, shape)
        padded[name] = Stored(stored.dtype, shape, at, end)
        at = end
    return Rewrite(header, padded)


def _state(headers: list[Header], config: Mapping[str, Any], planned: Plan) -> dict[str, Any]:
    """What a DST.partial was made from and for."""
    files = {}
    for header in headers:
        stat = header.file.stat()
        files[header.file.name] = [stat.st_size, stat.st_mtime_ns]
    spreads = {name: (s.stock, s.runs) for name, s in sorted(planned.spreads.items())}
    made = json.dumps([planned.padded_config(config), spreads], sort_keys=True, default=str)
    return {"plan": hashlib.sha256(made.encode()).hexdigest(), "files": files}


def _refuse_other_run(partial: Path, state: dict[str, Any]) -> None:
    if not partial.exists():
        return
    if not partial.is_dir():
        raise ValueError(f"{partial} is not a folder; remove it and run again")
    try:
        found = json.loads((partial / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = None
    begun = any(path != unfinished(partial / STATE) for path in partial.iterdir())
    if found != state and begun:
        raise ValueError(f"{partial} is left from another run; remove it and run again")


def _copied_bytes(source: Path, links: list[str], partial: Path) -> int:
    """Bytes of files that cannot be linked because they are on another filesystem."""
    device = partial.parent.stat().st_dev
    stats = [(source / name).stat() for name in links if not (partial / name).exists()]
    return sum(stat.st_size for stat in stats if stat.st_dev != device)


def _write(rewrite: Rewrite, entries: Mapping[str, Entry], target: Path) -> Iterator[int]:
    """Writes a file tensor by tensor, one while the next is padded; yields the bytes of each."""
    import torch
    from safetensors import safe_open

    from tp3.pad.room import Room
    from tp3.pad.weights import pad_tensor

    room = Room()
    with (
        unfinished(target).open("wb") as out,
        ThreadPoolExecutor(1) as writer,
        safe_open(rewrite.header.file, framework="pt") as handle,
    ):
        written = writer.submit(out.write, rewrite.head)
        yield len(rewrite.head)
        for name, stored in rewrite.padded.items():
            tensor = handle.get_tensor(name)
            if not entries[name].inert:
                tensor = pad_tensor(entries[name], tensor, room)
            data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
            assert data.nbytes == stored.end - stored.begin, (name, stored, data.nbytes)
            written.result()
            yield stored.end - stored.begin
            written = writer.submit(out.write, memoryview(data))
            del tensor, data  # their memory is that of the next but one
        written.result()
        out.flush()
        os.fsync(out.fileno())
    os.replace(unfinished(target), target)


def _padded_index(
    index: dict[str, Any], headers: list[Header], rewrites: list[Rewrite]
) -> dict[str, Any]:
    """The same index with the size that the tensors have now."""
    data = {
        header.file.name: max((t.end for t in header.tensors.values()), default=0)
        for header in headers
    }
    data.update({rewrite.name: rewrite.data_bytes for rewrite in rewrites})
    metadata = dict(index.get("metadata") or {})
    metadata.pop("total_parameters", None)  # counted in the trained shapes
    return {**index, "metadata": {**metadata, "total_size": sum(data.values())}}
