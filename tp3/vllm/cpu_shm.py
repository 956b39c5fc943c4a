"""The CPU shared-memory switch: vLLM's C++ collectives, which no process group sees, stay off.

They also refuse 5 and 7 ranks.
"""

from __future__ import annotations

from tp3.vllm.anchors import Anchor, Hook
from tp3.vllm.settings import Settings

SWITCH = Anchor(
    "vllm.distributed.device_communicators.cpu_communicator:"
    "CpuCommunicator._all_group_ranks_share_shm_group_name",
    ("self",),
)


def install(settings: Settings) -> None:
    """Nothing of its own: ``cpu_communicator``'s subclass says no."""


HOOK = Hook("cpu_shm", "vLLM's C++ collectives on CPUs are off under r4d", (SWITCH,), install,
            wanted=lambda settings: settings.backend != "default")  # fmt: skip
