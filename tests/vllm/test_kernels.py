"""Which layers of a padded model run on tp3's kernels, and that vLLM keeps all others."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from vllm.model_executor.kernels import linear
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend
from vllm.model_executor.layers.quantization import mxfp4
from vllm.model_executor.layers.quantization.utils import quant_utils as keys

from tests.vllm.layers import (
    BF16,
    armed,
    config_of,
    engine,
    fp8,
    moe_config,
    operators,
    parallel,
    stock,
)
from tp3.vllm import fp8_kernel, kernels, mxfp4_kernels
from tp3.vllm.anchors import problems
from tp3.vllm.settings import Settings

__all__ = ["armed", "engine", "operators"]  # fixtures


@pytest.fixture
def said(monkeypatch):
    """What the log says."""
    lines = []
    heard = SimpleNamespace(info=lambda text, *args: lines.append(text % args))
    monkeypatch.setattr(kernels, "logger", heard)
    return lines


def test_vllm_is_as_the_hook_expects():
    assert problems([kernels.HOOK]) == []


BLOCKS = keys.create_fp8_quant_key(static=True, group_shape=keys.GroupShape(128, 128))


@pytest.mark.parametrize(
    ("config", "ours"),
    [
        (fp8(), True),
        (fp8(weight=keys.kFp8StaticTensorSym, x=keys.kFp8StaticTensorSym), True),
        (fp8(num_n=4496), False),
        (fp8(num_k=136), False),
        (fp8(out=torch.float16), False),
        (fp8(weight=BLOCKS, x=keys.kFp8Dynamic128Sym), False),
    ],
    ids=["channel", "tensor", "fits", "K", "fp16", "blocks"],
)
def test_fp8_layers_whose_n_cutlass_does_not_take(armed, config, ours):
    choose = fp8_kernel.choose(stock)
    found = choose(config, linear._POSSIBLE_FP8_KERNELS)
    assert (found is fp8_kernel.PaddedFp8Kernel) == ours
    assert choose(config, linear._POSSIBLE_FP8_BLOCK_KERNELS) == "vLLM's"
    kernels.arm(config_of(stock=True))
    assert choose(config, linear._POSSIBLE_FP8_KERNELS) == "vLLM's"


def test_vllm_makes_the_kernel_that_it_is_given(armed, engine, monkeypatch):
    choose = fp8_kernel.choose(linear.choose_scaled_mm_linear_kernel)
    monkeypatch.setattr(linear, "choose_scaled_mm_linear_kernel", choose)
    kernel = linear.init_fp8_linear_kernel(
        activation_quant_key=keys.kFp8DynamicTokenSym,
        weight_quant_key=keys.kFp8StaticTokenSym,
        input_dtype=BF16,
        out_dtype=BF16,
        weight_shape=(36, 64),
    )
    assert type(kernel) is fp8_kernel.PaddedFp8Kernel


class Marlin:
    """vLLM's method as it is made where Marlin is the backend."""

    def __init__(self, monkeypatch):
        made = (Mxfp4MoeBackend.MARLIN, None)
        monkeypatch.setattr(mxfp4, "select_mxfp4_moe_backend", lambda moe: made)

    def __call__(self, config, layer, prefix):
        return mxfp4.GptOssMxfp4MoEMethod(layer.moe_config)


@pytest.mark.parametrize(
    ("changes", "ours"),
    [
        ({}, True),
        ({"width": 480}, True),
        ({"width": 128}, False),
        ({"width": 1024}, False),
        ({"width": 80}, False),
        ({"in_dtype": torch.float16}, False),
        ({"activation": MoEActivation.SILU}, False),
        ({"moe_backend": "marlin"}, False),
        ({"moe_parallel_config": parallel(use_ep=True)}, False),
        ({"moe_parallel_config": parallel(dp_size=2)}, False),
        ({"is_lora_enabled": True}, False),
    ],
    ids=lambda each: "-".join(map(str, each)) if isinstance(each, dict) else None,
)
def test_experts_whose_width_vllm_would_round_up(armed, engine, monkeypatch, said, changes, ours):
    get = mxfp4_kernels.method(Marlin(monkeypatch))
    layer = SimpleNamespace(moe_config=moe_config(**changes))
    found = get(None, layer, "model.layers.0.mlp.experts")
    assert isinstance(found, mxfp4_kernels.PaddedExperts) == ours
    moe = layer.moe_config
    sizes = moe.hidden_dim, moe.intermediate_size_per_partition
    rounded = found.maybe_roundup_sizes(*sizes, BF16, moe.moe_parallel_config)
    assert (rounded == sizes) == ours
    get(None, layer, "model.layers.1.mlp.experts")
    assert len(said) == ours
    assert all(text.startswith("tp3: MXFP4 experts run on tp3's kernel: ") for text in said)
    kernels.arm(config_of(stock=True))
    assert type(get(None, layer, "")) is mxfp4.GptOssMxfp4MoEMethod


def test_experts_of_another_method_stay_as_they_are(armed, engine):
    other = SimpleNamespace(maybe_roundup_sizes=lambda *sizes: (64, 128))
    layer = SimpleNamespace(moe_config=moe_config())
    assert mxfp4_kernels.method(lambda *args: other)(None, layer, "") is other
    linear_layer = SimpleNamespace()
    assert mxfp4_kernels.method(stock)(None, linear_layer, "") == "vLLM's"


def test_experts_that_vllm_refuses(armed, engine):
    def refuse(config, layer, prefix):
        raise NotImplementedError("no backend")

    layer = SimpleNamespace(moe_config=moe_config())
    assert isinstance(mxfp4_kernels.method(refuse)(None, layer, ""), mxfp4_kernels.PaddedExperts)
    kernels.arm(config_of(stock=True))
    with pytest.raises(NotImplementedError, match="no backend"):
        mxfp4_kernels.method(refuse)(None, layer, "")


@pytest.mark.parametrize(
    ("mark", "on"), [({}, True), ({"lifted": []}, False), ({"stock": True}, False)]
)
def test_armed_where_the_plan_was_made_with_the_kernels(mark, on):
    kernels.arm(config_of(**mark))
    assert kernels.armed() == on
    kernels.arm(config_of(stock=True))


@pytest.mark.parametrize(
    ("settings", "dtype", "serves", "lifts"),
    [
        (Settings(), BF16, True, True),
        (Settings(), BF16, False, False),
        (Settings(), torch.float16, True, False),
        (Settings(kernels=False), BF16, True, False),
    ],
    ids=["gpu", "cpu", "fp16", "off"],
)
def test_lifted_where_the_kernels_run(monkeypatch, settings, dtype, serves, lifts):
    monkeypatch.setattr(kernels, "device_serves", lambda: serves)
    assert bool(kernels.lifted(SimpleNamespace(dtype=dtype), settings)) == lifts
