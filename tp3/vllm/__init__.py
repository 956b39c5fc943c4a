"""The vLLM plugin: `vllm serve MODEL --tensor-parallel-size 3` for any model and any size.

vLLM calls ``register`` in each of its processes (entry point ``vllm.general_plugins``). Importing
this package imports neither vLLM nor torch.
"""

__all__ = ["register"]


def register() -> None:
    """Install the hooks that the settings ask for, all or none. Idempotent.

    Errors: ValueError for a setting, or a vLLM whose insides are not those that the hooks know.
    """
    from tp3.vllm.settings import Settings

    settings = Settings.from_env()
    if settings.inert:
        return
    from tp3.vllm.install import install

    install(settings)
