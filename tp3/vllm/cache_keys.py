"""The cache-key hook: what is compiled for a padded model never serves the stock one.

vLLM's caches are keyed by a hash of the config, in which the widened sizes and the mark stand; that
this is so is checked each time, because a stale compiled graph would be a wrong answer.
"""

from __future__ import annotations

from typing import Any

from tp3.vllm.anchors import Anchor, Hook
from tp3.vllm.settings import Settings

KEY = Anchor("vllm.config.model:ModelConfig.compute_hash", ("self",))


def key(model_config: Any) -> str:
    """What vLLM keys its compiled graphs by."""
    return str(model_config.compute_hash())


def check(before: str, model_config: Any) -> None:
    """Errors: ValueError when padding has not changed the key."""
    if key(model_config) == before:
        raise ValueError(KEY.told("the hash does not change with the sizes of the model"))


def install(settings: Settings) -> None:
    """Nothing of its own: ``config`` calls ``check``."""


HOOK = Hook("cache_keys", "compiled graphs of padded models have keys of their own",
            (KEY,), install)  # fmt: skip
