"""The norms hook: a norm over a padded width gets its own epsilon.

Its weight is corrected in the stream (``tp3.pad.corrections``); engines read one epsilon for all
norms, so the module's is multiplied here, after the model was made and before anything compiles it.
The anchor is the loader's stream (``weights``), which is given the model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tp3.vllm.anchors import Hook
from tp3.vllm.settings import Settings

EPSILONS = ("variance_epsilon", "eps")
_DONE = "_tp3_eps_factor"


def apply(model: Any, factors: Mapping[str, float]) -> int:
    """Multiply the epsilons of a model's modules by their pattern; how many there were.

    Errors: ValueError for a pattern that no module has: the model would be another function.
    """
    count = 0
    for pattern, factor in factors.items():
        parts = "".join(
            r"\d+" if each == "*" else re.escape(each) for each in re.split(r"(\*)", pattern)
        )
        named = re.compile(r"(?:.*\.)?" + parts)
        found = [module for name, module in model.named_modules() if named.fullmatch(name)]
        if not found:
            raise ValueError(
                f"tp3: {type(model).__name__} of this vLLM has no module {pattern}, whose epsilon "
                f"must be multiplied by {factor:g}"
            )
        for module in found:
            _multiply(module, pattern, factor)
        count += len(found)
    return count


def _multiply(module: Any, pattern: str, factor: float) -> None:
    if hasattr(module, _DONE):
        return
    name = next((each for each in EPSILONS if isinstance(getattr(module, each, None), float)), None)
    if name is None:
        raise ValueError(
            f"tp3: {pattern} of this vLLM is a {type(module).__name__} without "
            f"{' or '.join(EPSILONS)}; its epsilon must be multiplied by {factor:g}"
        )
    setattr(module, name, getattr(module, name) * factor)
    setattr(module, _DONE, factor)


def install(settings: Settings) -> None:
    """Nothing of its own: ``weights`` calls ``apply``."""


HOOK = Hook("norms", "the epsilon of norms over padded widths", (), install)
