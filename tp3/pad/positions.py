"""Positions that depend on how many query heads there are: ALiBi. No torch.

Engines make a head's slope from its number and the count of heads, so any other count gives nearly
every trained head another slope.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

# Where configs say so: the key, and what it must hold.
SAID = (
    ("alibi", True),
    ("use_alibi", True),
    ("position_embedding_type", "alibi"),
    ("pos_emb_type", "alibi"),
)
FOLDERS = ("", "text_config", "attn_config")


def slopes(config: Mapping[str, Any]) -> str:
    """The place in the config that asks for slopes by head; empty where none does."""
    return next(_said(config), "")


def _said(config: Mapping[str, Any]) -> Iterator[str]:
    for folder in FOLDERS:
        values = config.get(folder) if folder else config
        if isinstance(values, Mapping):
            for key, value in SAID:
                if values.get(key) == value:
                    yield f"{folder}.{key}".lstrip(".")
