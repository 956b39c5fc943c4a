"""tp3: large language models on 3, 5, 6 or 7 GPUs.

Importing this package does nothing and needs neither torch nor triton.
"""

__version__ = "0.1.0"
__all__ = ["__version__", "register"]


def register() -> None:
    """Make the backend `r4d` known to torch.distributed.

    The entry point `torch.backends` calls this at the end of `import torch`, where an exception
    would break torch for the whole environment: a failure is logged instead. Call
    `tp3.comm.register()` to have it raised.
    """
    try:
        from tp3.comm import register as register_backend

        register_backend()
    except Exception as error:
        import logging

        logging.getLogger("tp3").warning("the r4d backend is not available: %r", error)
