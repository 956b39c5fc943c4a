"""Where ranks run: what is chosen, what is refused, and how ranks are started there."""

import os

import pytest
import torch

from tp3.comm.launch import launch
from tp3.smoke import site as site_module
from tp3.smoke.site import Site, open_site


@pytest.fixture
def gpus(monkeypatch):
    return lambda count: monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


@pytest.mark.parametrize(
    ("device", "count", "chosen"),
    [
        ("auto", 0, Site("cpu")),
        ("auto", 2, Site("cuda", 2)),
        ("cuda", 1, Site("cuda", 1)),
        ("cpu", 4, Site("cpu")),
    ],
)
def test_choice(gpus, device, count, chosen):
    gpus(count)
    with open_site(device) as site:
        assert site == chosen


@pytest.mark.parametrize(
    ("device", "mps", "sentence"),
    [
        ("tpu", False, "device must be auto, cpu, cuda, got 'tpu'"),
        ("cuda", False, "device cuda needs a GPU, but torch .* finds none; use device cpu, or"),
        ("auto", True, "MPS needs a GPU, but torch .* finds none"),
        ("cpu", True, "MPS shares GPUs, got device 'cpu'; leave one of the two out"),
    ],
)
def test_refusals(gpus, device, mps, sentence):
    gpus(0)
    with pytest.raises(ValueError, match=sentence), open_site(device, mps=mps):
        pass


def test_words():
    assert [str(site) for site in (Site("cpu"), Site("cuda", 1), Site("cuda", 2, {"a": "b"}))] == [
        "cpu",
        "cuda, 1 GPU",
        "cuda, 2 GPUs, MPS",
    ]
    assert Site("cpu").sharing(3) == ""
    assert Site("cuda", 2).sharing(2) == ""
    sliced = "2 ranks on a GPU, contexts time-sliced unless MPS runs"
    assert Site("cuda", 2).sharing(3) == sliced
    assert Site("cuda", 1, {"a": "b"}).sharing(3) == "3 ranks on a GPU, through MPS"


def test_ranks_on_gpus_are_spawned_with_the_daemons_environment(monkeypatch):
    calls = []

    def record(*args, **options):
        calls.append((args, options))
        return ["result"]

    monkeypatch.setattr(site_module, "launch", record)
    site = Site("cuda", 1, {"CUDA_MPS_PIPE_DIRECTORY": "/pipe"})
    site.launch(test_words, 3, "argument")
    assert site.alone(test_words, "argument") == "result"
    assert [args for args, _ in calls] == [(test_words, 3, "argument"), (test_words, 1, "argument")]
    assert [options["init"] for _, options in calls] == [True, False]
    for _, options in calls:
        assert (options["start"], options["device"]) == ("spawn", "cuda")
        assert options["env"] == {"CUDA_MPS_PIPE_DIRECTORY": "/pipe"}


def test_one_on_cpu_is_this_process():
    assert Site("cpu").alone(lambda rank, world_size: (rank, world_size, os.getpid())) == (
        0,
        1,
        os.getpid(),
    )


CHOSEN = []


def chosen(rank, world_size):
    return CHOSEN


def test_a_rank_has_its_gpu_before_it_joins(gpus, monkeypatch):
    gpus(2)
    monkeypatch.setattr(torch.cuda, "set_device", CHOSEN.append)
    assert launch(chosen, 3, init=False, device="cuda") == [[0], [1], [0]]
    assert launch(chosen, 2, init=False) == [[], []]
    with pytest.raises(ValueError, match="device is 'tpu'; it must be 'cpu' or 'cuda'"):
        launch(chosen, 1, device="tpu")
