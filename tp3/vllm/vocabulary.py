"""The vocabulary hook: the embedding's own rounding goes to a multiple of the ranks.

vLLM pads an embedding to 64 rows with zeros, cuts it evenly, and trims the logits; all that is
missing is a multiple that divides.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from math import lcm
from typing import Any

from tp3.vllm.anchors import Anchor, Hook, wrap
from tp3.vllm.settings import Settings

PLACE = "vllm.model_executor.layers.vocab_parallel_embedding"
EMBEDDING = Anchor(f"{PLACE}:VocabParallelEmbedding.__init__", ("self", "padding_size"))
RANKS = Anchor(f"{PLACE}:get_tensor_model_parallel_world_size", ())


def install(settings: Settings) -> None:
    """Change the argument ``padding_size`` where it would not divide."""

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            bound = signature.bind(self, *args, **kwargs)
            bound.apply_defaults()
            given = bound.arguments
            ranks = _ranks(given)
            if given["padding_size"] % ranks:
                bound.arguments["padding_size"] = lcm(given["padding_size"], ranks)
                original(*bound.args, **bound.kwargs)
            else:
                original(self, *args, **kwargs)

        return __init__

    wrap(EMBEDDING, around)


def _ranks(given: dict[str, Any]) -> int:
    if given.get("disable_tp"):
        return 1
    group = given.get("parallel_group")
    if group is not None:
        return int(group.world_size)
    owner, name = RANKS.find()
    return int(getattr(owner, name)())


HOOK = Hook("vocabulary", "embeddings rounded to a multiple of the ranks",
            (EMBEDDING, RANKS), install)  # fmt: skip
