"""The kernels hook: padded layers whose local shape vLLM's kernels do not take as it is.

vLLM copies such weights into larger ones (or refuses). In a padded model on an NVIDIA GPU they run
on ``torch.ops.tp3`` instead, which takes any N and what the format asks of K, and the planner asks
no more than that (``lifted``). Every other layer, and every stock model, keeps vLLM's kernels.

| layer | vLLM's kernel takes | ours |
|---|---|---|
| FP8 by tensor or channel | N and K in multiples of 16 (CUTLASS) | ``fp8_linear`` |
| MXFP4 linear | N, K in multiples of 64, 128 or 128, 64 (Marlin) | ``mxfp4_linear`` |
| MXFP4 experts of gpt-oss | widths that it does not round up | ``mxfp4_moe`` |

Not FP8 in blocks of 128: every rank after the first would begin inside of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tp3.vllm.anchors import Anchor, Hook, wrap
from tp3.vllm.backend import WORKER
from tp3.vllm.log import logger
from tp3.vllm.plans import ALIGNMENT, mark_of
from tp3.vllm.settings import Settings

LINEAR = "vllm.model_executor.kernels.linear"
CHOOSE = Anchor(
    f"{LINEAR}:choose_scaled_mm_linear_kernel", ("config", "possible_kernels", "force_kernel")
)
FP8_KERNELS = Anchor(f"{LINEAR}:_POSSIBLE_FP8_KERNELS")
MARLIN = f"{LINEAR}.mxfp4.marlin:MarlinMxFp4LinearKernel"
PREPARE = Anchor(f"{MARLIN}.process_weights_after_loading", ("self", "layer"))
APPLY = Anchor(f"{MARLIN}.apply_weights", ("self", "layer", "x", "bias"))
QUANTISATION = "vllm.model_executor.layers.quantization.mxfp4"
METHOD = Anchor(f"{QUANTISATION}:Mxfp4Config.get_quant_method", ("self", "layer", "prefix"))
EXPERTS = Anchor(f"{QUANTISATION}:GptOssMxfp4MoEMethod.apply", ("layer", "topk_ids"))
LAYERS = "vllm.model_executor.layers"
# What the kernels are made from.
BASES = (
    Anchor(f"{LINEAR}.scaled_mm.ScaledMMLinearKernel:FP8ScaledMMLinearKernel"),
    Anchor(f"{LAYERS}.activation:SwigluOAIAndMul"),
    Anchor(f"{LAYERS}.fused_moe:FusedMoEMethodBase"),
    Anchor(f"{LAYERS}.fused_moe.oracle.mxfp4:Mxfp4MoeBackend.NONE"),
)

CAPABILITY = 89  # of the first NVIDIA GPUs with matrix units for e4m3
_armed = False
_told: set[str] = set()


def device_serves() -> bool:
    """Whether this process's device runs the kernels."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cuda() and current_platform.has_device_capability(CAPABILITY))


def lifted(model_config: Any, settings: Settings) -> tuple[str, ...]:
    """Formats of ``plans.ALIGNMENT`` that the kernels free of it."""
    if not settings.kernels or str(model_config.dtype) != "torch.bfloat16" or not device_serves():
        return ()
    return tuple(sorted(ALIGNMENT))


def arm(vllm_config: Any) -> None:
    """Offer the kernels in this process, where its model was planned with them."""
    global _armed
    mark = mark_of(vllm_config.model_config) or {}
    _armed = bool(mark.get("lifted"))
    if _armed:
        from tp3.kernels.ops import register

        register()


def armed() -> bool:
    return _armed


def tell(kind: str, why: str) -> None:
    """Name a kind of layer in the log, once."""
    if kind not in _told:
        _told.add(kind)
        logger.info("tp3: %s: %s; TP3_KERNELS=0 keeps vLLM's", kind, why)


def install(settings: Settings) -> None:
    """Stand before vLLM's choices."""
    from tp3.vllm import fp8_kernel, mxfp4_kernels

    def worker(original: Callable[..., Any]) -> Callable[..., Any]:
        def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
            arm(vllm_config)
            original(self, vllm_config, *args, **kwargs)

        return __init__

    wrap(WORKER, worker)
    wrap(CHOOSE, fp8_kernel.choose)
    wrap(PREPARE, mxfp4_kernels.prepare)
    wrap(APPLY, mxfp4_kernels.apply)
    wrap(METHOD, mxfp4_kernels.method)


HOOK = Hook("kernels", "shapes that vLLM's kernels do not take run on tp3's",
            (WORKER, CHOOSE, FP8_KERNELS, PREPARE, APPLY, METHOD, EXPERTS, *BASES), install,
            wanted=lambda settings: settings.pad and settings.kernels)  # fmt: skip
