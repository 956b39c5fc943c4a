"""FP8 linear layers scaled by tensor or channel whose N CUTLASS does not take.

vLLM asks ``choose_scaled_mm_linear_kernel`` for a class; it is given ``PaddedFp8Kernel``, which
quantises activations as vLLM does and multiplies by ``torch.ops.tp3.fp8_linear``. Imported by
``kernels``, which wraps that function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import (
    FP8ScaledMMLinearKernel,
)

from tp3.vllm import kernels

UNIT = 16  # of N and K: CUTLASS; of K: ours


class PaddedFp8Kernel(FP8ScaledMMLinearKernel):  # type: ignore[misc]
    """y [M, N] bf16 of x [M, K]; the weight stays as it was loaded."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None

    @classmethod
    def can_implement(cls, c: Any) -> tuple[bool, str | None]:
        if not takes(c):
            return False, "tp3 takes FP8 by tensor or channel, K in multiples of 16, bf16 outside"
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """weight [K, N], a view of [N, K], stays; its scale becomes one of each row, [N] fp32."""
        weight, weight_scale = self.layer_param_names[:2]
        num_n = getattr(layer, weight).shape[1]
        scale = getattr(layer, weight_scale).detach().float().reshape(-1)
        scale = torch.nn.Parameter(scale.expand(num_n).contiguous(), requires_grad=False)
        setattr(layer, weight_scale, scale)

    def apply_scaled_mm(
        self,
        *,
        A: torch.Tensor,
        B: torch.Tensor,
        out_dtype: torch.dtype,
        As: torch.Tensor,
        Bs: torch.Tensor,
        bias: torch.Tensor | None,
        output_shape: list[int],
    ) -> torch.Tensor:
        """A [M, K] e4m3, As [M, 1] or one for all; B [K, N] e4m3, Bs [N]."""
        x_scale = As.reshape(-1)
        if not self.config.activation_quant_key.scale.group_shape.is_per_token():
            x_scale = x_scale.expand(A.shape[0]).contiguous()
        y: torch.Tensor = torch.ops.tp3.fp8_linear(A, B.t(), Bs, x_scale)
        return (y if bias is None else y + bias).view(*output_shape)


def takes(config: Any) -> bool:
    """Whether the kernel can run a layer."""
    weight = config.weight_quant_key.scale.group_shape
    x = config.activation_quant_key.scale.group_shape
    return bool(
        (weight.is_per_tensor() or weight.is_per_token() or weight.is_per_channel())
        and (x.is_per_tensor() or x.is_per_token())
        and config.weight_shape[1] % UNIT == 0
        and config.input_dtype == config.out_dtype == torch.bfloat16
    )


def choose(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around ``choose_scaled_mm_linear_kernel``."""
    owner, name = kernels.FP8_KERNELS.find()

    def choose_scaled_mm_linear_kernel(
        config: Any, possible_kernels: Any, *a: Any, **k: Any
    ) -> Any:
        ours = kernels.armed() and possible_kernels is getattr(owner, name) and takes(config)
        num_n, num_k = config.weight_shape if ours else (0, 0)
        if ours and num_n % UNIT:
            kernels.tell(
                "FP8 linear layers run on tp3's kernel",
                f"one has {num_n} rows of {num_k} on a rank, vLLM's takes multiples of {UNIT}",
            )
            return PaddedFp8Kernel
        return original(config, possible_kernels, *a, **k)

    return choose_scaled_mm_linear_kernel
