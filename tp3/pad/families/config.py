"""Reading a config: a missing or malformed value is a ValueError of one sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Config:
    """A config, or one of its folders (``at`` is the folder's path with a dot, or empty)."""

    def __init__(self, values: Mapping[str, Any], at: str = "") -> None:
        self.values = values
        self.at = at

    def folder(self, name: str) -> Config:
        """A nested config; ValueError when it is not there."""
        inner = self.values.get(name)
        if not isinstance(inner, Mapping):
            raise ValueError(f"{self.at}{name} is missing from the config")
        return Config(inner, f"{self.at}{name}.")

    def has(self, name: str) -> bool:
        return self.values.get(name) is not None

    def size(self, name: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self.values.get(name)
        if value is None:
            if default is None:
                raise ValueError(f"{self.at}{name} is missing from the config")
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{self.at}{name} must be a positive integer, got {value!r}")
        return value

    def count(self, name: str, default: int = 0) -> int:
        """An integer that may be zero."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(f"{self.at}{name} must be an integer from 0, got {value!r}")
        return value

    def listed(self, name: str) -> list[Any] | None:
        """A list of names or numbers, if it is there."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(each, str | int) for each in value):
            raise ValueError(f"{self.at}{name} must be a list of names or numbers, got {value!r}")
        return list(value)

    def inner(self, name: str) -> Config:
        """A nested config, empty when it is not there."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise ValueError(f"{self.at}{name} must be a dictionary, got {value!r}")
        return Config(value or {}, f"{self.at}{name}.")

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ValueError(f"{self.at}{name} must be true or false, got {value!r}")
        return value

    def path(self, name: str) -> str:
        """The dotted path of a key, as ``Model.paths`` wants it."""
        return self.at + name

    def heads(self) -> tuple[int, int, int]:
        """Query heads, KV heads and head_dim as decoders name and derive them."""
        q, hidden = self.size("num_attention_heads"), self.size("hidden_size")
        kv = self.size("num_key_value_heads", q)
        if q % kv:
            raise ValueError(
                f"num_attention_heads must be a multiple of num_key_value_heads, got {q} and {kv}"
            )
        if not self.has("head_dim") and hidden % q:
            raise ValueError(
                f"head_dim is missing and hidden_size {hidden} does not divide by "
                f"num_attention_heads {q}"
            )
        return q, kv, self.size("head_dim", hidden // q)
