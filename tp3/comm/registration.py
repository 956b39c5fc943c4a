"""Making the name ``r4d`` known to ``torch.distributed``."""

from __future__ import annotations

from typing import Any

NAME = "r4d"


def register() -> None:
    """Make ``init_process_group("r4d")`` work. Idempotent; does nothing in a torch without c10d."""
    import torch.distributed as dist  # here: torch's end of import calls this function

    if dist.is_available() and NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])


def _create(options: Any, backend_options: Any) -> Any:
    from tp3.comm.process_group import ProcessGroupR4D

    return ProcessGroupR4D(options)
