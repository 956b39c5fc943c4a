"""`ranks(function)` runs it on every rank of the backend under test."""

import os

import pytest

from tests.ranks.reference import BACKEND, ON_DEVICE
from tp3.comm.launch import launch

WORLD_SIZES = [int(w) for w in os.environ.get("TP3_TEST_WORLD_SIZES", "2,3,5").split(",")]


@pytest.fixture(params=WORLD_SIZES, ids=lambda w: f"W{w}")
def world_size(request):
    return request.param


@pytest.fixture
def ranks(world_size):
    def run(function, *args, **options):
        options = {"backend": BACKEND, "env": {"GLOO_SOCKET_IFNAME": "lo"}, **options}
        return launch(function, world_size, *args, **{**ON_DEVICE, **options})

    return run
