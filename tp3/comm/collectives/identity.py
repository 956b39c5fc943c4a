"""The algorithm of a group of one."""

from __future__ import annotations

from typing import Any


def nothing(*args: Any) -> None:
    """The tensor is its own sum already."""
