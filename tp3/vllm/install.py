"""All hooks, as a table; installed together or not at all."""

from __future__ import annotations

from importlib import import_module

from tp3.vllm.anchors import Hook, problems
from tp3.vllm.settings import Settings

HOOKS = (
    "config",
    "weights",
    "vocabulary",
    "norms",
    "vision",
    "draft",
    "cache_keys",
    "kernels",
    "backend",
    "communicator",
    "cpu_shm",
    "ranks_per_gpu",
)


def every_hook() -> list[Hook]:
    """In the order in which they are installed."""
    return [import_module(f"tp3.vllm.{name}").HOOK for name in HOOKS]


def hooks(settings: Settings) -> list[Hook]:
    """Those that the settings ask for."""
    return [hook for hook in every_hook() if hook.wanted(settings)]


def install(settings: Settings) -> None:
    """Find every anchor, then change vLLM. Idempotent. Errors: ValueError, and nothing changed."""
    wanted = hooks(settings)
    found = problems(wanted)
    if found:
        raise ValueError(found[0])
    for hook in wanted:
        hook.install(settings)
