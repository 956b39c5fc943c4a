"""A padded gpt-oss in MXFP4 through vLLM, its experts on tp3's kernels, which have stand-ins here.

Held to Transformers in fp32 on the dequantised weights as ``test_engine_bf16`` does: on average its
log-probabilities may be off by a quarter more than those of the stock model on one rank.
"""

from __future__ import annotations

import pytest
import torch

from tests.vllm import fleet, gpt_oss
from tests.vllm.test_engine_bf16 import FACTOR, PROMPTS, reference

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not torch.cpu._is_amx_tile_supported(),
        reason="vLLM's CPU build runs MXFP4 experts on processors with AMX alone",
    ),
]
RUNS = {
    "stock": (1, {"TP3_TEST_KERNELS": "1"}),
    "padded": (3, {"TP3_TEST_KERNELS": "1"}),
    "off": (3, {"TP3_TEST_KERNELS": "1", "TP3_KERNELS": "0"}),
}


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """For each of ``RUNS`` what the model said, and its mean error."""
    root = tmp_path_factory.mktemp("mxfp4")
    model, found = gpt_oss.save(root / "model"), {}
    want = reference(model)
    for name, (tp, env) in RUNS.items():
        models = {name: {"model": str(model), "dtype": "bfloat16"}}
        said = fleet.run(root / name, models, tp=tp, prompts=PROMPTS, tokens=1, env=env)[name]
        pairs = [
            (a, b)
            for answer, right in zip(said["answers"], want, strict=True)
            for a, b in zip(answer["prompt_logprobs"], right, strict=True)
        ]
        log = "".join(each.read_text() for each in sorted((root / name).glob("rank*.log")))
        off = sum(abs(a - b) for a, b in pairs) / len(pairs)
        found[name] = {**said, "off": off, "log": log}
    print({name: each["off"] for name, each in found.items()})
    return found


def test_as_close_to_the_model_as_stock(said):
    assert said["padded"]["kernels"]["mxfp4_moe"] > 0
    assert said["padded"]["off"] < FACTOR * said["stock"]["off"]


def test_the_log_names_them_once_a_rank(said):
    assert said["padded"]["log"].count("MXFP4 experts run on tp3's kernel") == 3


def test_stock_models_and_the_switch_leave_vllm_its_own(said):
    for name in ("stock", "off"):
        assert said[name]["kernels"] == {}
        assert "tp3's kernel" not in said[name]["log"]
    assert said["off"]["mark"]
    assert said["off"]["off"] < FACTOR * said["stock"]["off"]
