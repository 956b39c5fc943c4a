"""Every environment variable that the plugin reads, and nothing else in it reads them.

What `tp3.comm` reads stands in `tp3.comm.settings`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

BACKENDS = ("auto", "r4d", "default")
SWITCH = {"1": True, "0": False}


@dataclass(frozen=True)
class Settings:
    """What the plugin may do.

    pad: models that do not divide by the tensor-parallel size are padded.
    backend: who carries the collectives: ``r4d``, vLLM's own (``default``), or ``auto``: r4d for
        padded models and where ranks share a GPU.
    ranks_per_gpu: how many ranks share each GPU; NCCL is then never touched.
    strict: a checkpoint that does not match the plan stops the load; otherwise it is a warning.
    kernels: padded layers whose local shape vLLM's kernels take only made larger, or not at all,
        run on those of `tp3.kernels`.
    """

    pad: bool = True
    backend: str = "auto"
    ranks_per_gpu: int = 1
    strict: bool = True
    kernels: bool = True

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ValueError(f"TP3_BACKEND is {self.backend!r}; allowed: {', '.join(BACKENDS)}")
        if self.ranks_per_gpu < 1:
            raise ValueError(f"TP3_RANKS_PER_GPU is {self.ranks_per_gpu}; it must be 1 or more")
        if self.ranks_per_gpu > 1 and self.backend == "default":
            raise ValueError(
                f"TP3_RANKS_PER_GPU is {self.ranks_per_gpu} and TP3_BACKEND is 'default'; NCCL "
                "refuses ranks that share a GPU: use r4d or auto"
            )

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Settings:
        """Read the settings; ValueError names the variable, what it holds and what is allowed."""
        ranks = env.get("TP3_RANKS_PER_GPU", "1")
        if not ranks.isdigit():
            raise ValueError(f"TP3_RANKS_PER_GPU is {ranks!r}; it must be a whole number")
        return cls(
            pad=_switch(env, "TP3_PAD"),
            backend=env.get("TP3_BACKEND", cls.backend),
            ranks_per_gpu=int(ranks),
            strict=_switch(env, "TP3_STRICT"),
            kernels=_switch(env, "TP3_KERNELS"),
        )

    @property
    def inert(self) -> bool:
        """Whether there is nothing to do for any model."""
        return not self.pad and self.backend != "r4d" and self.ranks_per_gpu == 1

    def carries(self, padded: bool) -> bool:
        """Whether r4d carries the collectives of a model."""
        return self.backend == "r4d" or (
            self.backend == "auto" and (padded or self.ranks_per_gpu > 1)
        )


def _switch(env: Mapping[str, str], name: str) -> bool:
    text = env.get(name, "1")
    if text not in SWITCH:
        raise ValueError(f"{name} is {text!r}; allowed: {', '.join(SWITCH)}")
    return SWITCH[text]
