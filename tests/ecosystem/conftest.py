"""Shared launcher for the ecosystem tests: three forked ranks on the backend under test.

Rank functions compute their single-process reference themselves: the parent, which forks, starts no
threads of torch.
"""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo  # heavy, and otherwise imported by every rank of every test

from tp3.comm.launch import launch

BACKEND = os.environ.get("TP3_TEST_BACKEND", "r4d")

torch.set_num_threads(1)


@pytest.fixture
def ranks() -> Callable[..., list]:
    """`ranks(function, *args, world_size=3)` runs `function(rank, world_size, *args)`."""

    def run(function: Callable[..., Any], *args: Any, world_size: int = 3) -> list:
        env = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        return launch(
            function, world_size, *args, backend=BACKEND, start="fork", timeout=60.0, env=env
        )

    return run
