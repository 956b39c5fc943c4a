"""The shared-GPU hook: ``TP3_RANKS_PER_GPU`` ranks on each GPU, for development and CI.

vLLM counts devices by ranks here, every rank is led back to a GPU there is, memory is shared out,
and NCCL, which refuses such ranks, is never made.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from tp3.vllm.anchors import Anchor, Hook, wrap, wrap_at
from tp3.vllm.backend import WORKER
from tp3.vllm.settings import Settings

COUNT = Anchor("vllm.platforms:current_platform.device_count", ("cls",))
VISIBLE = Anchor(
    "vllm.platforms.interface:Platform.logical_device_id_to_visible_device_id",
    ("cls", "device_id"),
)
PHYSICAL = Anchor(
    "vllm.platforms.interface:Platform.device_id_to_physical_device_id", ("cls", "device_id")
)
ASSIGNED = Anchor("vllm.config.parallel:ParallelConfig.assigned_physical_gpu_ids")
NO_NCCL = "VLLM_DISABLE_PYNCCL"


def prepare(vllm_config: Any, settings: Settings) -> None:
    """Errors: ValueError where vLLM would measure memory that other ranks take meanwhile."""
    if settings.ranks_per_gpu == 1 or vllm_config.parallel_config.world_size == 1:
        return
    if getattr(vllm_config.cache_config, "kv_cache_memory_bytes", None) is None:
        raise ValueError(
            f"tp3: TP3_RANKS_PER_GPU is {settings.ranks_per_gpu}: say what each rank's cache may "
            "take, --kv-cache-memory-bytes 2G, because vLLM cannot measure a GPU that it shares"
        )


def install(settings: Settings) -> None:
    """Count devices by ranks, and lead ranks back to devices."""
    from vllm.platforms import current_platform

    platform = type(current_platform)
    many = settings.ranks_per_gpu
    os.environ[NO_NCCL] = "1"
    real = platform.device_count

    def count(original: Callable[..., Any]) -> Callable[..., Any]:
        def device_count(cls: Any) -> int:
            return int(original(cls)) * many

        return device_count

    def visible(original: Callable[..., Any]) -> Callable[..., Any]:
        def logical_device_id_to_visible_device_id(cls: Any, device_id: int) -> int:
            return int(device_id % real())

        return logical_device_id_to_visible_device_id

    def worker(original: Callable[..., Any]) -> Callable[..., Any]:
        def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
            parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
            if parallel.world_size > 1:
                parallel.assigned_physical_gpu_ids = [
                    platform.device_id_to_physical_device_id(rank % real())
                    for rank in range(parallel.world_size)
                ]
                cache.gpu_memory_utilization /= many
            original(self, vllm_config, *args, **kwargs)

        return __init__

    wrap_at(platform, "device_count", count)
    wrap_at(platform, "logical_device_id_to_visible_device_id", visible)
    wrap(WORKER, worker)


HOOK = Hook("ranks_per_gpu", "several ranks share a GPU, without NCCL",
            (COUNT, VISIBLE, PHYSICAL, ASSIGNED, WORKER), install,
            wanted=lambda settings: settings.ranks_per_gpu > 1)  # fmt: skip
