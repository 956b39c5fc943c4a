"""What ranks that share GPUs do, in classes such as vLLM's: which GPUs they are led to, and who
carries what PyNccl would.
"""

import os
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from tp3.vllm import backend, ranks_per_gpu
from tp3.vllm.settings import Settings

PLACES = "vllm.distributed.device_communicators"


def module(monkeypatch, name, **content):
    """A module of vLLM with this content alone."""
    made = ModuleType(name)
    made.__dict__.update(content)
    monkeypatch.setitem(sys.modules, name, made)
    return made


class Platform:
    """Two GPUs, the fourth and the sixth of the machine."""

    dist_backend = "nccl"

    @classmethod
    def device_count(cls):
        return 2

    @classmethod
    def logical_device_id_to_visible_device_id(cls, device_id):
        return device_id

    @classmethod
    def device_id_to_physical_device_id(cls, device_id):
        return (3, 5)[device_id]


class Worker:
    def __init__(self, vllm_config):
        self.found = list(vllm_config.parallel_config.assigned_physical_gpu_ids)


@pytest.fixture
def engine(monkeypatch):
    """A platform and a worker of their own."""
    platform, worker = type("Fresh", (Platform,), {}), type("Fresh", (Worker,), {})
    module(monkeypatch, "vllm")
    module(monkeypatch, "vllm.platforms", current_platform=platform())
    module(monkeypatch, "vllm.v1.worker.worker_base", WorkerBase=worker)
    for name in (*backend.OFF, ranks_per_gpu.NO_NCCL):
        monkeypatch.setenv(name, "kept")
    return platform, worker


def whole(world_size):
    return SimpleNamespace(
        parallel_config=SimpleNamespace(world_size=world_size, assigned_physical_gpu_ids=[]),
        cache_config=SimpleNamespace(gpu_memory_utilization=0.9),
        model_config=SimpleNamespace(hf_config=None, hf_text_config=None),
    )


def test_ranks_are_led_to_the_gpus_that_are_visible(engine):
    platform, worker = engine
    settings = Settings(ranks_per_gpu=2)
    ranks_per_gpu.install(settings)
    ranks_per_gpu.install(settings)
    assert platform.device_count() == 4
    where = platform.logical_device_id_to_visible_device_id
    assert [where(rank) for rank in range(4)] == [0, 1, 0, 1]
    config = whole(3)
    assert worker(config).found == [3, 5, 3]
    assert config.cache_config.gpu_memory_utilization == 0.45
    assert os.environ[ranks_per_gpu.NO_NCCL] == "1"


def test_what_a_group_would_be_made_with_is_off_and_comes_back(engine):
    platform, _ = engine
    backend.arm(whole(2), Settings(backend="r4d"))
    assert platform.dist_backend == "r4d"
    assert {os.environ[name] for name in backend.OFF} == {"0"}
    backend.arm(whole(1), Settings(backend="r4d"))
    assert platform.dist_backend == "nccl"
    assert {os.environ[name] for name in backend.OFF} == {"kept"}


class Base:
    def broadcast(self, tensor, src=0):
        return "group"

    reduce_scatter = broadcast

    def reduce_scatterv(self, tensor, dim=-1, sizes=None):
        return "group"


class Cuda(Base):
    def broadcast(self, tensor, src=0):
        return "nccl"

    reduce_scatter = broadcast

    def reduce_scatterv(self, tensor, dim=-1, sizes=None):
        return "nccl"


@pytest.mark.parametrize(
    ("nccl", "carries"),
    [
        (None, "group"),
        (SimpleNamespace(disabled=True), "group"),
        (SimpleNamespace(disabled=False), "nccl"),
    ],
    ids=["none", "disabled", "pynccl"],
)
def test_without_nccl_the_device_group_carries(monkeypatch, nccl, carries):
    module(monkeypatch, f"{PLACES}.base_device_communicator", DeviceCommunicatorBase=Base)
    module(monkeypatch, f"{PLACES}.cuda_communicator", CudaCommunicator=Cuda)
    monkeypatch.delitem(sys.modules, "tp3.vllm.cuda_communicator", raising=False)
    from tp3.vllm.cuda_communicator import R4DCudaCommunicator

    made = R4DCudaCommunicator()
    made.pynccl_comm = nccl
    assert made.broadcast(torch.ones(1), 1) == carries
    assert made.reduce_scatter(torch.ones(3), 0) == carries
    assert made.reduce_scatterv(torch.ones(3), 0, [1, 2]) == carries
