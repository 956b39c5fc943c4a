"""Zero padding that lets a model run at any tensor-parallel size, exactly.

`config.json → model → plan → catalogue → tensor → engine`: all before the tensor is integers and
data; torch is imported when weights are read or padded, never by importing this package.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tp3.pad.checkpoint import read_weights
    from tp3.pad.configs import read_config
    from tp3.pad.planner import Plan, plan
    from tp3.pad.weights import padded_weights

__all__ = ["Plan", "padded_weights", "plan", "read_config", "read_weights"]

_HOME = {
    "Plan": "planner",
    "padded_weights": "weights",
    "plan": "planner",
    "read_config": "configs",
    "read_weights": "checkpoint",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
