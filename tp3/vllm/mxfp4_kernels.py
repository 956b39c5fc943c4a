"""MXFP4 linears that Marlin does not take, and experts of gpt-oss whose width vLLM rounds up.

Imported by ``kernels``, which wraps what these functions stand before. Weights stay as they were
loaded. Symbols: T tokens, C choices of each, E experts, H hidden size, I width on this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.activation import SwigluOAIAndMul
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4MoEMethod

from tp3.vllm import kernels

BLOCK = 32  # of K, that share a scale
MARLIN = ((64, 128), (128, 64))  # N and K in multiples of one of these
INTERLEAVED = "swigluoai"  # vLLM's name of gpt-oss's activation: gate and up row by row
_OURS = "_tp3_mxfp4"


def prepare(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around Marlin's ``process_weights_after_loading``: the layer is ours, or repacked."""

    def process_weights_after_loading(self: Any, layer: Any) -> None:
        num_n, num_k = layer.weight.shape[0], 2 * layer.weight.shape[1]
        fits = any(num_n % n == 0 and num_k % k == 0 for n, k in MARLIN)
        if fits or num_k % BLOCK or not kernels.armed():
            original(self, layer)
            return
        setattr(layer, _OURS, True)
        kernels.tell(
            "MXFP4 linear layers run on tp3's kernel",
            f"one has {num_n} rows of {num_k} on a rank, Marlin takes multiples of 64 and 128",
        )

    return process_weights_after_loading


def apply(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around Marlin's ``apply_weights``."""

    def apply_weights(self: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Any:
        if not getattr(layer, _OURS, False):
            return original(self, layer, x, bias)
        rows = x.reshape(-1, x.shape[-1])
        y = torch.ops.tp3.mxfp4_linear(rows, layer.weight, layer.weight_scale)
        y = y if bias is None else y + bias
        return y.view(*x.shape[:-1], y.shape[-1])

    return apply_weights


def method(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around ``Mxfp4Config.get_quant_method``: vLLM's method, or ours where it would round the
    width up, or refuses.
    """

    def get_quant_method(self: Any, layer: Any, prefix: str) -> Any:
        moe = getattr(layer, "moe_config", None)
        if not kernels.armed() or moe is None or not takes(moe):
            return original(self, layer, prefix)
        width = moe.intermediate_size_per_partition
        try:
            found = original(self, layer, prefix)
        except (NotImplementedError, ValueError) as error:
            return _ours(moe, f"vLLM refuses a width of {width} on a rank ({error})")
        if type(found) is not GptOssMxfp4MoEMethod:
            return found
        sizes = moe.hidden_dim, width, moe.in_dtype, moe.moe_parallel_config
        rounded = found.maybe_roundup_sizes(*sizes)[1]
        if rounded == width:
            return found
        return _ours(moe, f"vLLM would round a width of {width} on a rank up to {rounded}")

    return get_quant_method


def takes(moe: Any) -> bool:
    """Whether ``PaddedExperts`` can run a layer: gpt-oss's, cut by width, with vLLM's own choice of
    a kernel.
    """
    return bool(
        moe.activation.value == INTERLEAVED
        and moe.in_dtype == torch.bfloat16
        and moe.moe_backend == "auto"
        and moe.hidden_dim % BLOCK == 0
        and moe.intermediate_size_per_partition % BLOCK == 0
        and moe.moe_parallel_config.dp_size == 1
        and not moe.moe_parallel_config.use_ep
        and not moe.is_lora_enabled
    )


def _ours(moe: Any, why: str) -> Any:
    kernels.tell("MXFP4 experts run on tp3's kernel", why)
    return PaddedExperts(moe)


class PaddedExperts(GptOssMxfp4MoEMethod):  # type: ignore[misc]
    """vLLM's parameters at their own sizes, and two calls of ``torch.ops.tp3.mxfp4_moe``."""

    def __init__(self, moe: Any) -> None:
        FusedMoEMethodBase.__init__(self, moe)
        self.weight_dtype = "gpt_oss_mxfp4"
        self.mxfp4_backend, self.experts_cls = Mxfp4MoeBackend.NONE, None
        self.activation = SwigluOAIAndMul()

    @property
    def is_monolithic(self) -> bool:
        return False

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, *_: Any, **__: Any
    ) -> tuple[int, int]:
        return hidden_size, intermediate_size_per_partition

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Nothing: the kernels read what was loaded."""

    def get_fused_moe_quant_config(self, layer: torch.nn.Module) -> None:
        return None

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any = None,
        shared_experts_input: Any = None,
    ) -> Tensor:
        """y [T, H] of x [T, H]; weights and ids [T, C]. w13 [E, 2 I, H/2], w2 [E, H, I/2] uint8."""
        tokens, choices = topk_ids.shape
        ids = topk_ids.long()
        up = torch.ops.tp3.mxfp4_moe(x, layer.w13_weight, layer.w13_weight_scale, ids)
        if self.moe.has_bias:
            up = up + layer.w13_bias[ids]
        activation = self.activation.forward_cuda if x.is_cuda else self.activation.forward_native
        inner = activation(up.flatten(0, 1))
        each = ids.view(-1, 1)
        down = torch.ops.tp3.mxfp4_moe(inner, layer.w2_weight, layer.w2_weight_scale, each)
        down = down.view(tokens, choices, -1)
        if self.moe.has_bias:
            down = down + layer.w2_bias[ids]
        y: Tensor = (down * topk_weights[..., None]).sum(1)
        return y.to(x.dtype)
