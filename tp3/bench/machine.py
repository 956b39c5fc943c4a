"""What a figure depends on: versions, and the hardware by name."""

from __future__ import annotations

import os
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from tp3 import __version__


def versions(device: str) -> dict[str, str]:
    """Versions of what takes part; "unknown" where a tool to ask is missing."""
    found = {"tp3": __version__, "torch": torch.__version__, "triton": _installed("triton")}
    if device == "cuda":
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["driver"] = _driver()
    return found


def hardware(device: str) -> str:
    """`2 × NVIDIA H200`, or the cores and the processor."""
    if device == "cpu":
        return f"{len(os.sched_getaffinity(0))} cores of {_processor()}"
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names))


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return (answer.stdout.split() or ["unknown"])[0]


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "unknown"
