"""Start ``engine.py``, and compare what models said."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

PROMPTS = [[1, 5, 9, 200, 31, 7], [1, 77, 301, 12], [1, 450, 3, 3, 90, 111, 260, 8, 19], [1, 2]]
TOKENS = 12
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "TP_SOCKET_IFNAME": "lo",
}


def run(
    folder: Path,
    models: dict[str, dict[str, Any]],
    *,
    tp: int = 1,
    prompts: list[list[int]] = PROMPTS,
    tokens: int = TOKENS,
    env: dict[str, str] | None = None,
    timeout: float = 600.0,
) -> dict[str, Any]:
    """What each model said (``engine.run``). models: arguments of ``LLM`` by name."""
    folder.mkdir(parents=True, exist_ok=True)
    job, out, failed = (folder / name for name in ("job.json", "out.json", "failed"))
    for each in (out, failed):
        each.unlink(missing_ok=True)
    what = {"models": models, "tp": tp, "prompts": prompts, "tokens": tokens}
    job.write_text(json.dumps({**what, "ports": free_ports(len(models))}))
    command = [sys.executable, str(Path(__file__).with_name("engine.py")), str(job), str(folder)]
    with (folder / "engine.log").open("w") as log:
        process = subprocess.Popen(
            command,
            env={**os.environ, **ENVIRONMENT, **(env or {})},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if code:
        rank = failed.read_text() if failed.exists() else ""
        log_file = folder / (f"rank{rank}.log" if rank else "engine.log")
        raise AssertionError(f"{log_file}:\n{log_file.read_text()[-6000:]}")
    said: dict[str, Any] = json.loads(out.read_text())
    return said


def free_ports(count: int) -> list[int]:
    """vLLM's external launcher meets under env://, so ports have to be named."""
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def differences(stock: dict[str, Any], padded: dict[str, Any]) -> tuple[int, float]:
    """Prompts whose tokens differ, and the largest difference of a log-probability."""
    worst, apart = 0.0, 0
    for a, b in zip(stock["answers"], padded["answers"], strict=True):
        apart += a["tokens"] != b["tokens"]
        for kind in ("logprobs", "prompt_logprobs"):
            worst = max([worst, *(abs(x - y) for x, y in zip(a[kind], b[kind], strict=True))])
    return apart, worst
