"""The communicator hook: on r4d, vLLM's communicator of a device gives way to a subclass of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tp3.vllm.anchors import Anchor, Hook, wrap_at
from tp3.vllm.backend import armed
from tp3.vllm.settings import Settings

CHOICE = Anchor("vllm.platforms.interface:Platform.get_device_communicator_cls", ("cls",))
PLACES = "vllm.distributed.device_communicators"
OURS = {
    f"{PLACES}.cpu_communicator.CpuCommunicator": "tp3.vllm.cpu_communicator.R4DCpuCommunicator",
    f"{PLACES}.cuda_communicator.CudaCommunicator": (
        "tp3.vllm.cuda_communicator.R4DCudaCommunicator"
    ),
}


def install(settings: Settings) -> None:
    """Answer with the subclass where a group is made on r4d."""
    from vllm.platforms import current_platform

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        def get_device_communicator_cls(cls: Any) -> str:
            stock: str = original(cls)
            if not armed():
                return stock
            if stock not in OURS:
                raise ValueError(CHOICE.told(f"the communicator is {stock}"))
            return OURS[stock]

        return get_device_communicator_cls

    wrap_at(type(current_platform), "get_device_communicator_cls", around)


HOOK = Hook("communicator", "vLLM's communicators send their sums to r4d", (CHOICE,), install,
            wanted=lambda settings: settings.backend != "default")  # fmt: skip
