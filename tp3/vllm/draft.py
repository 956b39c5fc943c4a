"""The draft hook: draft models, and prediction layers inside of a checkpoint (MTP).

vLLM checks a draft's config by the function that it checks the target's with, so ``config`` widens
both; a draft of its own is another model with another plan. Prediction layers are read from the
target's checkpoint with the target's plan, and may skip the files that hold none of them.
"""

from __future__ import annotations

from typing import Any

from tp3.vllm.anchors import Anchor, Hook
from tp3.vllm.settings import Settings

PARALLEL = Anchor(
    "vllm.config.speculative:SpeculativeConfig.create_draft_parallel_config",
    ("target_parallel_config", "speculative_draft_tensor_parallel_size"),
)


def skips_files(model: Any) -> bool:
    """Whether a model may read less than all of its checkpoint."""
    return hasattr(model, "is_unused_checkpoint_weight")


def install(settings: Settings) -> None:
    """Nothing of its own: ``config`` widens drafts, ``weights`` asks ``skips_files``."""


HOOK = Hook("draft", "draft models and prediction layers are padded too", (PARALLEL,), install)
