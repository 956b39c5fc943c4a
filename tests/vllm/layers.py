"""Configs of vLLM's layers, and fixtures, for the tests of tp3's kernels in it. Imports vLLM."""

from types import SimpleNamespace

import pytest
import torch
from vllm.config import CompilationConfig, CompilationMode, VllmConfig, set_current_vllm_config
from vllm.model_executor.kernels import linear
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig
from vllm.model_executor.layers.quantization.utils import quant_utils as keys

from tests.vllm import stand_in
from tp3.kernels import ops
from tp3.vllm import kernels

BF16 = torch.bfloat16
MARK = {"tp": 3, "config": {}, "lifted": ["fp8", "mxfp4"]}


def config_of(**mark):
    hf = SimpleNamespace(tp3=MARK | mark) if mark != {"stock": True} else SimpleNamespace()
    return SimpleNamespace(model_config=SimpleNamespace(hf_config=hf, dtype=BF16))


def fp8(
    num_n=4491, num_k=128, weight=keys.kFp8StaticTokenSym, x=keys.kFp8DynamicTokenSym, out=BF16
):
    return linear.FP8ScaledMMLinearLayerConfig(weight, x, (num_n, num_k), out, out)


def parallel(dp_size=1, use_ep=False):
    sizes = dict.fromkeys(("tp_size", "pcp_size", "ep_size", "sp_size"), 1)
    ranks = dict.fromkeys(("tp_rank", "pcp_rank", "dp_rank", "ep_rank"), 0)
    more = {"all2all_backend": "allgather_reducescatter", "enable_eplb": False}
    return FusedMoEParallelConfig(dp_size=dp_size, use_ep=use_ep, **sizes, **ranks, **more)


def moe_config(width=96, hidden=64, **changes):
    return SimpleNamespace(
        **{
            "activation": MoEActivation.SWIGLUOAI,
            "in_dtype": BF16,
            "moe_backend": "auto",
            "hidden_dim": hidden,
            "intermediate_size_per_partition": width,
            "moe_parallel_config": parallel(),
            "is_lora_enabled": False,
            "has_bias": True,
            "w13_num_shards": 2,
            "max_capture_size": 0,
            **changes,
        }
    )


def stock(*args, **kwargs):
    return "vLLM's"


@pytest.fixture(scope="module", autouse=True)
def operators():
    library = stand_in.operators()
    yield
    ops._registered.clear()
    library._destroy()


@pytest.fixture(scope="module")
def engine():
    """A config for vLLM's layers that are made of configs."""
    vllm_config = VllmConfig(compilation_config=CompilationConfig(mode=CompilationMode.NONE))
    vllm_config.model_config = SimpleNamespace(dtype=BF16, quantization_config=None)
    with set_current_vllm_config(vllm_config):
        yield


@pytest.fixture
def armed(monkeypatch):
    monkeypatch.setattr(kernels, "_told", set())
    kernels.arm(config_of())
    yield
    kernels.arm(config_of(stock=True))
