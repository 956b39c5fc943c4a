"""Building a folder: links or copies, files that appear whole, room, one writer. No torch."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

UNFINISHED = ".unfinished"
# Weights beside those of the index would keep the trained shapes, so they stay behind.
WEIGHT_SUFFIXES = frozenset((".safetensors", ".bin", ".pt", ".pth", ".gguf", ".ckpt", ".msgpack"))
SPARE_BYTES = 16 << 20  # for the config, the index and the filesystem itself
NO_LINK = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP)


def files_beside(source: Path, weights: set[str]) -> tuple[list[str], list[str]]:
    """Names in a folder, such as the tokenizer's, that go along with ``weights``; and those of
    other weights. What begins with a dot is no part of a checkpoint.
    """
    along: list[str] = []
    behind: list[str] = []
    for folder, folders, files in os.walk(source):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for file in sorted(files):
            name = str(Path(folder, file).relative_to(source))
            if name not in weights and not file.startswith("."):
                (behind if Path(file).suffix in WEIGHT_SUFFIXES else along).append(name)
    return along, behind


def link(source: Path, target: Path) -> None:
    """A hard link, or a copy where there cannot be one; nothing where ``target`` is there."""
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    real = source.resolve()  # a hub cache holds symbolic links
    try:
        os.link(real, target)
    except OSError as error:
        if error.errno not in NO_LINK:
            raise
        shutil.copy2(real, unfinished(target))
        os.replace(unfinished(target), target)


def unfinished(target: Path) -> Path:
    """The name of a file that is being written."""
    return target.with_name(target.name + UNFINISHED)


def write_json(target: Path, value: Any) -> None:
    """In one step, and never through a hard link."""
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    unfinished(target).write_text(text, encoding="utf-8")
    os.replace(unfinished(target), target)


def check_space(parent: Path, needed: int, partial: Path) -> None:
    """Errors: ValueError when ``parent`` has no room for ``needed`` bytes."""
    stat = os.statvfs(parent)
    free = stat.f_bavail * stat.f_frsize
    if partial.exists():  # what an interrupted run left of one file is written over
        free += sum(file.stat().st_size for file in partial.glob("*" + UNFINISHED))
    if free < needed + SPARE_BYTES:
        raise ValueError(
            f"{parent} has {free} bytes free, the padded checkpoint needs {needed + SPARE_BYTES}"
        )


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Makes a folder and keeps a second run out of it."""
    folder.mkdir(exist_ok=True)
    lock = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ValueError(f"{folder} is being written by another run") from error
        yield
    finally:
        os.close(lock)
