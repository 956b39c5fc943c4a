"""vLLM's CPU communicator over torch.distributed alone. Imported by vLLM, where r4d carries."""

from __future__ import annotations

from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator


class R4DCpuCommunicator(CpuCommunicator):  # type: ignore[misc]
    """Every collective goes to the device group, which is r4d's."""

    def _all_group_ranks_share_shm_group_name(self) -> bool:
        return False
