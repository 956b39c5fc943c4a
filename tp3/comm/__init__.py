"""The ``r4d`` backend of ``torch.distributed``. Importing this package does not import torch."""

__all__ = ["register"]


def register() -> None:
    """Make ``init_process_group("r4d")`` work where backends are not loaded by themselves.
    Idempotent.
    """
    from tp3.comm.registration import register as register_backend

    register_backend()
