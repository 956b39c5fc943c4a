"""A number of heads that still knows the width of one.

Some of vLLM's models compute a head's width as ``hidden_size // num_heads`` whatever the config
says, which cuts the heads of a padded model. Sources: vLLM 0.32, qwen2, olmoe, granitemoe,
internlm2, minicpm.

    4096 // HeadCount(33, hidden=4096, head_dim=128) == 128
"""

from __future__ import annotations

from typing import Any


class HeadCount(int):
    """An int; the model's hidden size divided by it is the head's width, without a remainder."""

    hidden: int
    head_dim: int

    def __new__(cls, count: int, *, hidden: int = 0, head_dim: int = 0) -> HeadCount:
        made = super().__new__(cls, count)
        made.hidden, made.head_dim = hidden, head_dim
        return made

    def __getnewargs_ex__(self) -> tuple[tuple[int], dict[str, int]]:
        return (int(self),), {"hidden": self.hidden, "head_dim": self.head_dim}

    def __rfloordiv__(self, other: Any) -> Any:
        return self.head_dim if other == self.hidden else other // int(self)

    def __rmod__(self, other: Any) -> Any:
        return 0 if other == self.hidden else other % int(self)

    def __rtruediv__(self, other: Any) -> Any:
        return float(self.head_dim) if other == self.hidden else other / int(self)


def head_count(count: int, *, hidden: int, head_dim: int) -> int:
    """A plain number where plain division gives the head's width."""
    if hidden == count * head_dim:
        return count
    return HeadCount(count, hidden=hidden, head_dim=head_dim)
