"""The backend hook: which backend vLLM's device groups are made with, in each process anew.

vLLM takes the name from its platform when a worker joins its group, and falls back to Gloo without
an error when the name is not registered: it is registered here.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from tp3.vllm.anchors import Anchor, Hook, wrap
from tp3.vllm.log import logger
from tp3.vllm.plans import mark_of
from tp3.vllm.settings import Settings

NAME = "r4d"
WORKER = Anchor("vllm.v1.worker.worker_base:WorkerBase.__init__", ("self", "vllm_config"))
PLATFORM = Anchor("vllm.platforms.interface:Platform.dist_backend")
TIMEOUT = Anchor("vllm.config.parallel:ParallelConfig.distributed_timeout_seconds")
CUSTOM = Anchor("vllm.config.parallel:ParallelConfig.disable_custom_all_reduce")
FUSED = Anchor("vllm.config.compilation:PassConfig.fuse_allreduce_rms")
# Read when groups are made: communicators that would take memory and carry nothing, and a way of
# making groups that knows NCCL alone.
OFF = (
    "VLLM_ALLREDUCE_USE_SYMM_MEM",
    "VLLM_ALLREDUCE_USE_FLASHINFER",
    "VLLM_DISTRIBUTED_USE_SPLIT_GROUP",
)
TIMEOUT_S = 600  # what PyTorch gives NCCL's groups; it gives all others half an hour
_stock: dict[type, tuple[str, dict[str, str | None]]] = {}


def carries(vllm_config: Any, settings: Settings) -> bool:
    """Whether r4d carries the collectives of this config."""
    return bool(vllm_config.parallel_config.world_size > 1) and settings.carries(
        mark_of(vllm_config.model_config) is not None
    )


def prepare(vllm_config: Any, settings: Settings) -> None:
    """Switch off what would take all-reduces past r4d, and bound its waits as NCCL's would be. The
    fused pass exists for 2, 4 and 8 ranks alone and brings its own communication.
    """
    if carries(vllm_config, settings):
        parallel = vllm_config.parallel_config
        parallel.disable_custom_all_reduce = True
        if parallel.distributed_timeout_seconds is None:
            parallel.distributed_timeout_seconds = TIMEOUT_S
        vllm_config.compilation_config.pass_config.fuse_allreduce_rms = False


def arm(vllm_config: Any, settings: Settings) -> None:
    """Set the backend of this process for a model, or set vLLM's own again."""
    from vllm.platforms import current_platform

    platform = type(current_platform)
    found = platform.dist_backend, {each: os.environ.get(each) for each in OFF}
    name, switches = _stock.setdefault(platform, found)
    if carries(vllm_config, settings):
        from tp3.comm import register

        register()
        name, switches = NAME, dict.fromkeys(OFF, "0")
        logger.info("tp3: r4d carries the collectives")
    platform.dist_backend = name
    for switch, value in switches.items():
        os.environ.pop(switch, None)
        if value is not None:
            os.environ[switch] = value


def armed() -> bool:
    """Whether the groups of this process are made on r4d."""
    from vllm.platforms import current_platform

    return bool(type(current_platform).dist_backend == NAME)


def install(settings: Settings) -> None:
    """Decide when a worker is made."""

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
            arm(vllm_config, settings)
            original(self, vllm_config, *args, **kwargs)

        return __init__

    wrap(WORKER, around)


ANCHORS = (WORKER, PLATFORM, TIMEOUT, CUSTOM, FUSED)
HOOK = Hook("backend", "device groups are made on r4d", ANCHORS, install,
            wanted=lambda settings: settings.backend != "default")  # fmt: skip
