"""One file in /dev/shm, mapped by every rank of a group on this host, and unlinked as soon as all
have it.

The name is unique, so nothing that a killed run left behind can be met again, and says who made it:
whoever creates a segment removes those whose maker was killed before the last attach. Its pages are
reserved at creation: on a full /dev/shm that is an error here, not a SIGBUS later.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import uuid
from pathlib import Path

from tp3.comm.transport.liveness import ProcessHandle

FOLDER = Path("/dev/shm")


def memory_identity() -> str:
    """Equal for two processes exactly when a file one makes in /dev/shm is there for the other."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat(FOLDER).st_dev}"


def create(nbytes: int) -> str:
    """Make and reserve a segment; its name. RuntimeError when /dev/shm cannot hold it."""
    remove_stale()
    maker = ProcessHandle.own()
    name = f"tp3-{_namespace()}-{maker.pid}-{maker.start}-{uuid.uuid4().hex}"
    path = FOLDER / name
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        _reserve(fd, nbytes)
    except BaseException:
        path.unlink()
        raise
    finally:
        os.close(fd)
    return name


def create_unnamed(nbytes: int) -> int:
    """A segment that ends with its last descriptor and mapping; its descriptor.

    Peers of the same pid namespace attach it as ``/proc/PID/fd/N`` while the descriptor is open.
    """
    fd = os.open(FOLDER, os.O_TMPFILE | os.O_RDWR, 0o600)
    try:
        _reserve(fd, nbytes)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _reserve(fd: int, nbytes: int) -> None:
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        stat = os.statvfs(FOLDER)
        raise RuntimeError(
            f"{FOLDER} is full: a group needs {nbytes} bytes and "
            f"{free_bytes()} of {stat.f_blocks * stat.f_frsize} are free; "
            "enlarge it (docker run --shm-size=1g) or end what fills it"
        ) from None


def remove_stale() -> None:
    """Remove segments whose maker, of this pid namespace, is dead."""
    for path in FOLDER.glob(f"tp3-{_namespace()}-*"):
        made = re.fullmatch(r"tp3-\d+-(\d+)-(\d+)-[0-9a-f]+", path.name)
        if made and not ProcessHandle(int(made[1]), int(made[2])).alive():
            with contextlib.suppress(PermissionError):
                path.unlink(missing_ok=True)


def _namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def free_bytes() -> int:
    """What /dev/shm has left."""
    stat = os.statvfs(FOLDER)
    return stat.f_bavail * stat.f_frsize


def attach(name: str, nbytes: int) -> mmap.mmap:
    """Map a segment made by a peer, by name or path; the mapping outlives both."""
    fd = os.open(FOLDER / name, os.O_RDWR)
    try:
        return mmap.mmap(fd, nbytes)
    finally:
        os.close(fd)


def unlink(name: str) -> None:
    """Remove the name; fine when it is gone already."""
    (FOLDER / name).unlink(missing_ok=True)
