"""An MPS daemon of our own, so that several ranks run on one GPU at the same time.

It lives in folders that nobody else knows, listens to nobody else, and is gone, with its folders,
when the context ends: normally, by an exception, Ctrl-C or SIGTERM. A daemon that was there before
is neither used nor touched.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CONTROL = "nvidia-cuda-mps-control"
FOLDERS = {"CUDA_MPS_PIPE_DIRECTORY": "pipe", "CUDA_MPS_LOG_DIRECTORY": "log"}
START_S = 30.0
QUIT_S = 60.0
REMOVE_S = 5.0  # a daemon that has been told to quit may still be writing


@contextmanager
def mps_daemon() -> Iterator[dict[str, str]]:
    """The environment in which CUDA processes go through the daemon.

    ValueError when there is no daemon to start or it does not start.
    """
    if shutil.which(CONTROL) is None:
        raise ValueError(
            f"MPS needs {CONTROL}, which is not on PATH; it comes with the NVIDIA driver: install "
            "its compute utilities, or leave MPS out"
        )
    with _ended_by_sigterm(), _private_folder() as folder:
        env = {name: str(folder / part) for name, part in FOLDERS.items()}
        for path in env.values():
            Path(path).mkdir()
        failure = _control(["-d"], "", env, folder, START_S)
        if failure:
            raise ValueError(
                f"the MPS daemon did not start, {CONTROL} -d {failure}; check that this user may "
                "use the GPUs, or leave MPS out"
            )
        try:
            yield env
        finally:
            failure = _control([], "quit\n", env, folder, QUIT_S)
            if failure:
                raise RuntimeError(
                    f"the MPS daemon did not end, {CONTROL} {failure}; end the processes whose "
                    f"CUDA_MPS_PIPE_DIRECTORY is {folder / 'pipe'}"
                )


def _control(
    arguments: list[str], text: str, env: Mapping[str, str], folder: Path, timeout: float
) -> str:
    """Run the control program with `text` as its input; how it failed in words, or nothing."""
    # The daemon renumbers the GPUs that it sees, and the ranks' CUDA_VISIBLE_DEVICES would then
    # select from the renumbered ones.
    inherited = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    said = folder / "said"  # a file: a daemon that kept a pipe open would be waited for
    with open(said, "w") as file:
        try:
            code = subprocess.run(
                [CONTROL, *arguments],
                input=text,
                text=True,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**inherited, **env},
                timeout=timeout,
            ).returncode
        except subprocess.TimeoutExpired:
            return f"took more than {timeout:g} s"
        except OSError as error:
            return f"could not be run ({error.strerror})"
    if code == 0:
        return ""
    words = " ".join(said.read_text(errors="replace").split())
    return f"exited with code {code}" + (f" and said {words!r}" if words else "")


@contextmanager
def _private_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="tp3-mps-"))
    try:
        yield folder
    finally:
        deadline = time.monotonic() + REMOVE_S
        while folder.exists() and time.monotonic() < deadline:
            shutil.rmtree(folder, ignore_errors=True)
            if folder.exists():
                time.sleep(0.1)


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM as an exception, where Python lets us: it would leave the daemon behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: Any) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
