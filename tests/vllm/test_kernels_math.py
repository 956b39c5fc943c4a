"""What padded layers on tp3's kernels compute.

The operators run on a CPU here as their references in plain PyTorch; the kernels themselves are
tested in tests/kernels, and on a GPU with vLLM in tests/gpu.
"""

import pytest
import torch

pytest.importorskip("vllm")

from vllm.model_executor.kernels.linear.mxfp4.base import MxFp4LinearLayerConfig
from vllm.model_executor.kernels.linear.mxfp4.marlin import MarlinMxFp4LinearKernel
from vllm.model_executor.layers.quantization.utils import quant_utils as keys

from tests.vllm.layers import BF16, armed, engine, fp8, moe_config, operators, stock
from tp3.kernels import reference
from tp3.vllm import fp8_kernel, mxfp4_kernels

__all__ = ["armed", "engine", "operators"]  # fixtures

E4M3 = torch.float8_e4m3fn


def worst(got, want):
    return (got.double() - want.double()).abs().max().item()


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("weight", ["tensor", "channel"])
@pytest.mark.parametrize("x", ["tensor", "token", "static"])
def test_an_fp8_layer_is_its_dequantised_product(engine, weight, x, bias):
    """At 37 rows: against fp64 on the activations that vLLM quantised."""
    g = torch.Generator().manual_seed(1)
    num_n, num_k = 37, 48
    key = {
        "tensor": keys.kFp8DynamicTensorSym,
        "token": keys.kFp8DynamicTokenSym,
        "static": keys.kFp8StaticTensorSym,
    }[x]
    weight_key = keys.kFp8StaticTensorSym if weight == "tensor" else keys.kFp8StaticTokenSym
    names = ["weight", "weight_scale", "input_scale", "input_scale_ub"]
    kernel = fp8_kernel.PaddedFp8Kernel(fp8(num_n, num_k, weight_key, key), names)
    layer = torch.nn.Module()
    w = torch.randn(num_n, num_k, generator=g).to(E4M3)
    scale = torch.rand(1 if weight == "tensor" else (num_n, 1), generator=g) + 0.5
    layer.weight = torch.nn.Parameter(w.t(), requires_grad=False)
    layer.weight_scale = torch.nn.Parameter(scale, requires_grad=False)
    layer.input_scale = torch.tensor(0.02) if x == "static" else None
    kernel.process_weights_after_loading(layer)
    rows = torch.randn(2, 3, num_k, generator=g).to(BF16)
    b = torch.randn(num_n, generator=g).to(BF16) if bias else None
    y = kernel.apply_weights(layer, rows, b)
    codes, by = kernel.quant_fp8(rows.view(6, num_k), layer.input_scale)
    dense = w.double() * scale.double()
    want = codes.double() * by.double() @ dense.T
    near = (want.float().to(BF16) + b if bias else want.float().to(BF16)).double()
    want = want + b.double() if bias else want
    assert y.shape == (2, 3, num_n)
    assert y.dtype == BF16
    assert worst(y.view(6, num_n), want) <= 2 * worst(near, want)


def codes_of(g, *shape):
    """Random e2m1 pairs and scales of about a twentieth."""
    *stack, num_n, num_k = shape
    packed = torch.randint(0, 256, (*stack, num_n, num_k // 2), generator=g, dtype=torch.uint8)
    scales = torch.randint(121, 124, (*stack, num_n, num_k // 32), generator=g, dtype=torch.uint8)
    return packed, scales


@pytest.mark.parametrize(
    ("num_n", "num_k", "ours"),
    [
        (36, 96, True),
        (64, 64, True),
        (64, 96, True),
        (96, 128, True),
        (128, 64, False),
        (64, 128, False),
    ],
)
def test_an_mxfp4_layer_that_marlin_does_not_take(armed, monkeypatch, num_n, num_k, ours):
    monkeypatch.setattr(
        MarlinMxFp4LinearKernel, "is_supported", classmethod(lambda c: (True, None))
    )
    kernel = MarlinMxFp4LinearKernel(MxFp4LinearLayerConfig())
    g = torch.Generator().manual_seed(2)
    layer = torch.nn.Module()
    packed, scales = codes_of(g, num_n, num_k)
    layer.weight = torch.nn.Parameter(packed, requires_grad=False)
    layer.weight_scale = torch.nn.Parameter(scales, requires_grad=False)
    repacked = []
    mxfp4_kernels.prepare(lambda self, layer: repacked.append(layer))(kernel, layer)
    assert bool(repacked) != ours
    x = torch.randn(2, 3, num_k, generator=g).to(BF16)
    bias = torch.randn(num_n, generator=g).to(BF16)
    y = mxfp4_kernels.apply(stock)(kernel, layer, x, bias)
    if not ours:
        assert y == "vLLM's"
        return
    want = x.double() @ reference.mxfp4(packed, scales, torch.float64).T
    near = want.float().to(BF16) + bias
    assert worst(y, want + bias.double()) <= 2 * worst(near, want + bias.double())


def test_an_mxfp4_layer_of_a_stock_model_is_marlins():
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(torch.zeros(36, 48, dtype=torch.uint8), requires_grad=False)
    repacked = []
    mxfp4_kernels.prepare(lambda self, layer: repacked.append(layer))(None, layer)
    assert repacked == [layer]


E, C, H, T = 6, 2, 64, 9


def experts(width, bias):
    """A layer of vLLM's parameters with random weights; what was drawn."""
    g = torch.Generator().manual_seed(3)
    method = mxfp4_kernels.PaddedExperts(moe_config(width, H, has_bias=bias))
    layer = torch.nn.Module()
    method.create_weights(layer, E, H, width, BF16, weight_loader=None)
    method.process_weights_after_loading(layer)
    for name, parameter in layer.named_parameters():
        if name.endswith("_weight"):
            packed, scales = codes_of(g, E, parameter.shape[1], 2 * parameter.shape[2])
            parameter.copy_(packed)
            getattr(layer, name + "_scale").copy_(scales)
        elif name.endswith("_bias"):
            parameter.copy_(torch.randn(parameter.shape, generator=g))
    return method, layer


def drawn(tokens=T):
    g = torch.Generator().manual_seed(4)
    x = torch.randn(tokens, H, generator=g).to(BF16)
    weights, ids = torch.randn(tokens, E, generator=g).softmax(-1).topk(C)
    return x, weights, ids.int()


def dense(layer, x, weights, ids, dtype):
    """The same layer, expert by expert, on dequantised weights."""
    w13 = reference.mxfp4(layer.w13_weight, layer.w13_weight_scale, torch.float64).to(dtype)
    w2 = reference.mxfp4(layer.w2_weight, layer.w2_weight_scale, torch.float64).to(dtype)
    y = torch.zeros(x.shape, dtype=dtype)
    for t in range(x.shape[0]):
        for weight, expert in zip(weights[t].to(dtype), ids[t].tolist()):
            up = w13[expert] @ x[t].to(dtype)
            if hasattr(layer, "w13_bias"):
                up += layer.w13_bias[expert].to(dtype)
            gate, linear = up[::2].clamp(max=7.0), up[1::2].clamp(-7.0, 7.0)
            down = w2[expert] @ (gate * torch.sigmoid(gate * 1.702) * (linear + 1))
            if hasattr(layer, "w2_bias"):
                down += layer.w2_bias[expert].to(dtype)
            y[t] += weight * down
    return y


@pytest.mark.parametrize("bias", [True, False], ids=["bias", ""])
@pytest.mark.parametrize("width", [32, 96, 160])
def test_experts_are_their_dequantised_selves(engine, width, bias):
    """Error against fp64: at most twice that of the same mathematics in bf16."""
    method, layer = experts(width, bias)
    x, weights, ids = drawn()
    want = dense(layer, x, weights, ids, torch.float64)
    y = method.apply(layer, x, weights, ids)
    assert y.dtype == BF16
    assert not method.is_monolithic
    allowed = 2 * worst(dense(layer, x, weights, ids, BF16), want)
    print(worst(y, want), allowed)
    assert worst(y, want) <= allowed
    # the control: gate and up in halves, as other models have them
    for name in ("w13_weight", "w13_weight_scale"):
        rows = getattr(layer, name).clone()
        getattr(layer, name).copy_(torch.cat((rows[:, ::2], rows[:, 1::2]), 1))
    assert worst(method.apply(layer, x, weights, ids), want) > 10 * allowed


def test_padded_experts_are_the_trained_ones(engine):
    """Two ranks of 96 hold a width of 160; what the second rank has beyond it is zeros."""
    whole, parts = experts(160, True)[1], []
    for rank in range(2):
        method, layer = experts(96, True)
        inside = slice(96 * rank, min(96 * rank + 96, 160))
        count = inside.stop - inside.start
        both = slice(2 * inside.start, 2 * inside.stop)
        for name in ("w13_weight", "w13_bias", "w13_weight_scale"):
            ours = getattr(layer, name).zero_()
            ours[:, : 2 * count] = getattr(whole, name)[:, both]
        for name, unit in (("w2_weight", 2), ("w2_weight_scale", 32)):
            ours = getattr(layer, name).zero_()
            columns = slice(inside.start // unit, inside.stop // unit)
            ours[..., : count // unit] = getattr(whole, name)[..., columns]
        layer.w2_bias.copy_(whole.w2_bias if rank == 0 else torch.zeros_like(whole.w2_bias))
        parts.append(method.apply(layer, *drawn()).double())
    want = dense(whole, *drawn(), torch.float64)
    near = dense(whole, *drawn(), BF16)
    assert worst(sum(parts), want) <= 2 * worst(near, want)
