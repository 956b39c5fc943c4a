"""`vllm serve` as a process on a free port, up while the block runs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.vllm.fleet import ENVIRONMENT, free_ports

ARGUMENTS = (
    "--dtype", "float32", "--enforce-eager", "--max-model-len", "512",
    "--kv-cache-memory-bytes", str(256 << 20), "--no-enable-prefix-caching",
    "--max-num-seqs", "8", "--host", "127.0.0.1",
    "-cc", '{"custom_ops": ["all", "-rotary_embedding"]}',
)  # fmt: skip


@contextmanager
def serve(
    model: Path, folder: Path, *arguments: str, tp: int = 1, timeout: float = 300.0
) -> Iterator[str]:
    """The address of the server's API. Errors: AssertionError with the end of its log."""
    folder.mkdir(parents=True, exist_ok=True)
    (port,) = free_ports(1)
    vllm = [sys.executable, str(Path(__file__).with_name("serve_cpu.py"))]
    command = [*vllm, "serve", str(model), "--port", str(port), *ARGUMENTS, *arguments]
    env = {**os.environ, **ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(
            [*command, "--tensor-parallel-size", str(tp)], env=env, stdout=log, stderr=log
        )
    try:
        until_up(process, f"http://127.0.0.1:{port}/health", folder, timeout)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def until_up(process: subprocess.Popen[bytes], url: str, folder: Path, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise AssertionError((folder / "server.log").read_text()[-6000:])
