"""A padded gpt-oss in MXFP4 through vLLM on the GPUs at hand, its experts on tp3's kernels.

Three ranks share the GPUs there are. Held to Transformers in fp32 on the dequantised weights: the
mean error of a log-probability is at most 1.25 times that of the stock model on one rank.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.vllm import gpt_oss
from tests.vllm.test_engine_bf16 import FACTOR, PROMPTS, reference

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS == 0, reason="needs a GPU"),
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM"),
    pytest.mark.timeout(1800),
]
COMMON = {
    "dtype": "bfloat16",
    "max_model_len": 256,
    "max_num_batched_tokens": 2048,
    "kv_cache_memory_bytes": 256 << 20,
    "enable_prefix_caching": False,
    "skip_tokenizer_init": True,
    "attention_backend": "TRITON_ATTN",
    "enable_flashinfer_autotune": False,
}
# One prompt at a time, so that each is a replay of the graph that was captured for its length.
GRAPHS = {
    "max_num_seqs": 1,
    "compilation_config": {"cudagraph_capture_sizes": [1, len(PROMPTS[0])]},
}
NAMED = "MXFP4 experts run on tp3's kernel"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The checkpoint, and what its dequantised weights say in fp32."""
    # vLLM's own kernel takes tiles of 256 columns on Hopper, and does not compile for less.
    folder = gpt_oss.save(tmp_path_factory.mktemp("mxfp4") / "model", hidden_size=256)
    return folder, reference(folder)


def run(folder, want, tmp_path, tp, env=None, **options):
    """The mean error of a log-probability, and the log."""
    files = [tmp_path / f"{name}.json" for name in ("arguments", "prompts", "out")]
    arguments = {**COMMON, "model": str(folder), "tensor_parallel_size": tp, **options}
    for file, content in zip(files, (arguments, PROMPTS)):
        file.write_text(json.dumps(content))
    shared = {
        "TP3_RANKS_PER_GPU": str(-(-tp // GPUS)),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.said", *map(str, files)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, **shared, **(env or {})},
        capture_output=True,
        text=True,
        timeout=900,
    )
    log = done.stdout + done.stderr
    assert done.returncode == 0, log[-6000:]
    pairs = [
        (a, b)
        for told, right in zip(json.loads(files[2].read_text()), want, strict=True)
        for a, b in zip(told, right, strict=True)
    ]
    return sum(abs(a - b) for a, b in pairs) / len(pairs), log


@pytest.fixture(scope="module")
def stock(model, tmp_path_factory):
    return run(*model, tmp_path_factory.mktemp("stock"), 1, enforce_eager=True)


@pytest.mark.parametrize("mode", [{"enforce_eager": True}, GRAPHS], ids=["eager", "graphs"])
def test_padded_experts_in_mxfp4(model, stock, tmp_path, mode):
    off, log = run(*model, tmp_path, 3, **mode)
    print(f"mean error {off:.5f}, stock {stock[0]:.5f}")
    assert NAMED in log
    assert NAMED not in stock[1]
    assert off < FACTOR * stock[0]


def test_the_switch_leaves_vllm_its_own(model, stock, tmp_path):
    off, log = run(*model, tmp_path, 3, env={"TP3_KERNELS": "0"}, enforce_eager=True)
    assert NAMED not in log
    assert off < FACTOR * stock[0]
