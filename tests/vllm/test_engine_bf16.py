"""What vLLM's CPU kernels compute in bf16 alone: gated delta rules, and quantised weights.

In bf16 even an unpadded model on two ranks may say other tokens than on one, so the padded one is
held to Transformers in fp32: on average its log-probabilities may be off by a quarter more than
those of the stock model on one rank.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from tests.vllm import fleet, models, quantised

pytestmark = pytest.mark.timeout(900)
FACTOR = 1.25  # of stock vLLM's own error
LENGTH = 64
DRAWN = random.Random(0)
PROMPTS = [[1, *(DRAWN.randrange(3, 515) for _ in range(LENGTH))] for _ in range(40)]
AMX = torch.cpu._is_amx_tile_supported()  # vLLM's FP8 kernels for CPUs ask for it
NAMES = (*models.HYBRID, *(name for name in quantised.FORMATS if AMX or name != "fp8"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("bf16")
    made = {name: models.save(name, root / name) for name in models.HYBRID}
    return made | {name: quantised.save(name, root / name) for name in NAMES if name not in made}


@pytest.fixture(scope="module")
def off(folders, tmp_path_factory):
    """For each model the mean error of a prompt's log-probabilities on one rank and on three."""
    want = {name: reference(folder) for name, folder in folders.items()}
    found: dict[str, dict[int, float]] = {name: {} for name in folders}
    what = {name: {"model": str(each), "dtype": "bfloat16"} for name, each in folders.items()}
    for tp in (1, 3):
        folder = tmp_path_factory.mktemp(f"on{tp}")
        said = fleet.run(folder, what, tp=tp, prompts=PROMPTS, tokens=1)
        for name, model in said.items():
            assert bool(model["mark"]) == (tp == 3)
            assert any(each.startswith("all_reduce/") for each in model["stats"]) == (tp == 3)
            pairs = [
                (a, b)
                for answer, right in zip(model["answers"], want[name], strict=True)
                for a, b in zip(answer["prompt_logprobs"], right, strict=True)
            ]
            found[name][tp] = sum(abs(a - b) for a, b in pairs) / len(pairs)
    return found


def reference(folder: Path) -> list[list[float]]:
    import transformers

    dense = folder / "dense" if (folder / "dense").exists() else folder
    model = transformers.AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    ids = torch.tensor(PROMPTS)
    with torch.no_grad():
        logprobs = model(ids).logits[:, :-1].log_softmax(-1)
    return logprobs.gather(-1, ids[:, 1:, None])[..., 0].tolist()


@pytest.mark.parametrize("name", NAMES)
def test_as_close_to_the_model_as_stock(off, name):
    print(name, off[name])
    assert off[name][3] < FACTOR * off[name][1]
