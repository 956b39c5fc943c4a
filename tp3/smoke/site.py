"""Where the ranks of a smoke test run: on CPU, or on the GPUs at hand, several to one if need be.

The process that starts the ranks never opens a GPU: it counts them (torch asks NVML) and leaves the
rest to the ranks. An MPS daemon can then be started before anybody has a context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from tp3.comm.launch import launch
from tp3.smoke.mps import mps_daemon

DEVICES = ("auto", "cpu", "cuda")
# On GPUs the first call compiles kernels, and time-sliced ranks take milliseconds per call.
TIMEOUT_S = {"cpu": 60.0, "cuda": 240.0}


@dataclass(frozen=True)
class Site:
    """A kind of device and how many ranks share one.

    num_gpus: rank r runs on GPU r % num_gpus; 0 on CPU.
    mps_env: the environment of ranks under our own MPS daemon; empty without one.
    """

    device: Literal["cpu", "cuda"]
    num_gpus: int = 0
    mps_env: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert (self.device == "cuda") == (self.num_gpus > 0), self
        assert self.device == "cuda" or not self.mps_env, self

    def launch(
        self,
        function: Callable[..., Any],
        world_size: int,
        *args: Any,
        backend: str = "r4d",
        init: bool = True,
    ) -> list[Any]:
        """`function(rank, world_size, *args)` of every rank; `comm.launch` has the details."""
        return launch(
            function,
            world_size,
            *args,
            backend=backend,
            init=init,
            start="fork" if self.device == "cpu" else "spawn",
            device=self.device,
            timeout=TIMEOUT_S[self.device],
            env=self.mps_env,
        )

    def alone(self, function: Callable[..., Any], *args: Any) -> Any:
        """`function(0, 1, *args)` without a group; on GPUs in a process of its own."""
        if self.device == "cpu":
            return function(0, 1, *args)
        return self.launch(function, 1, *args, init=False)[0]

    def sharing(self, world_size: int) -> str:
        """What to know about times taken on `world_size` ranks; empty where nothing is shared."""
        if self.device == "cpu" or world_size <= self.num_gpus:
            return ""
        most = -(-world_size // self.num_gpus)
        how = "through MPS" if self.mps_env else "contexts time-sliced unless MPS runs"
        return f"{most} ranks on a GPU, {how}"

    def __str__(self) -> str:
        if self.device == "cpu":
            return "cpu"
        gpus = f"cuda, {self.num_gpus} GPU{'s' if self.num_gpus > 1 else ''}"
        return f"{gpus}, MPS" if self.mps_env else gpus


def synchronize(device: str) -> None:
    """Wait for what this process has given its GPU."""
    if device == "cuda":
        torch.cuda.synchronize()


@contextmanager
def open_site(device: str = "auto", *, mps: bool = False) -> Iterator[Site]:
    """The site for `device`, one of DEVICES ("auto": GPUs when there are any), and its MPS daemon.

    ValueError for what is not here.
    """
    if device not in DEVICES:
        raise ValueError(f"device must be {', '.join(DEVICES)}, got {device!r}")
    if mps and device == "cpu":
        raise ValueError("MPS shares GPUs, got device 'cpu'; leave one of the two out")
    num_gpus = 0 if device == "cpu" else torch.cuda.device_count()
    if num_gpus == 0:
        if device == "cuda" or mps:
            what = "MPS" if mps else "device cuda"
            raise ValueError(
                f"{what} needs a GPU, but torch {torch.__version__} finds none; use device cpu, or "
                "a CUDA build of torch on a machine where nvidia-smi lists a GPU"
            )
        yield Site("cpu")
        return
    if not mps:
        yield Site("cuda", num_gpus)
        return
    with mps_daemon() as env:
        yield Site("cuda", num_gpus, env)
