"""Have forked ranks run models, and compare what these said."""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
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
    # eager or not, each rank would have a C++ compiler make the counting of better tokens fast
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "TP_SOCKET_IFNAME": "lo",
}


HERE = Path(__file__).parent


@functools.cache
def forks() -> subprocess.Popen[str]:
    """``forks.py``, one for all tests of this process, ended before it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.vllm.forks"],
        cwd=HERE.parents[1],
        env={**os.environ, **ENVIRONMENT, **with_torchvision()},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    atexit.register(process.communicate)
    return process


def with_torchvision() -> dict[str, str]:
    """Qwen3.5's file imports vision code: torchvision lies beside the environment (Makefile)."""
    beside = os.environ.get("TP3_TEST_TORCHVISION", f"{sys.prefix}/torchvision")
    places = [str(HERE / "torchvision_ops"), beside, os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(place for place in places if place)}


def ask(
    folder: Path,
    what: dict[str, Any],
    *,
    ranks: int = 1,
    env: dict[str, str] | None = None,
    timeout: float = 600.0,
) -> None:
    """Have ``what`` done by forked ranks, which log to FOLDER/rankN.log.

    Errors: AssertionError with the end of the first failing rank's log.
    """
    folder.mkdir(parents=True, exist_ok=True)
    request = {**what, "ranks": ranks, "env": env or {}, "folder": str(folder)}
    process = forks()
    try:
        print(json.dumps(request), file=process.stdin, flush=True)
        if not select.select([process.stdout], [], [], timeout)[0]:
            raise TimeoutError(f"{folder}: no answer in {timeout} s")
        answer = process.stdout.readline()
        if not answer:
            raise AssertionError("tests.vllm.forks has ended; its stderr says why")
    except BaseException:
        forks.cache_clear()
        os.killpg(process.pid, signal.SIGKILL)
        raise
    failed = json.loads(answer)
    if failed is not None:
        log = folder / f"rank{failed}.log"
        raise AssertionError(f"{log}:\n{log.read_text()[-6000:]}")


def run(
    folder: Path,
    models: dict[str, dict[str, Any]],
    *,
    tp: int = 1,
    prompts: list[list[int]] = PROMPTS,
    tokens: int = TOKENS,
    pictures: bool = False,
    env: dict[str, str] | None = None,
) -> dict[str, Any]:
    """What each model said (``engine.run``). models: arguments of ``LLM`` by name. pictures: each
    prompt has one.
    """
    out = folder / "out.json"
    out.unlink(missing_ok=True)
    job = {"models": models, "tp": tp, "prompts": prompts, "tokens": tokens, "pictures": pictures}
    ask(folder, {"job": {**job, "ports": free_ports(len(models))}}, ranks=tp, env=env)
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
