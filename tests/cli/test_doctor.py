"""`tp3 doctor`: what is here and what would happen."""

import json

import pytest
from click.testing import CliRunner

from tp3.cli import doctor
from tp3.cli.main import main
from tp3.vllm.install import HOOKS


def told(*arguments, env=None):
    return CliRunner().invoke(main, ["doctor", *arguments], env=env)


def test_as_json():
    result = told("--json", "--world-size", "5", env={"TP3_PAD": "0", "TP3_ALLREDUCE": "two-shot"})
    found = json.loads(result.stdout)
    assert {"tp3", "python", "torch"} <= set(found["versions"])
    assert found["settings"]["TP3_PAD"] is False
    assert found["settings"]["TP3_ALLREDUCE"] == "two-shot"
    assert {row[2] for row in found["all_reduce"]} == {"two-shot", "gpu-two-shot"}


def test_as_a_screen():
    result = told()
    assert result.exit_code == 0
    for text in ("torch", "TP3_BACKEND=auto", "all_reduce of bfloat16 on 3 ranks", "one-shot"):
        assert text in result.stdout


def test_a_wrong_setting_is_one_sentence():
    result = told(env={"TP3_BACKEND": "nccl"})
    assert result.exit_code == 2
    assert "TP3_BACKEND is 'nccl'; allowed: auto, r4d, default" in result.stderr


@pytest.mark.parametrize(
    ("env", "problem", "state"),
    [
        ({}, [], "armed"),
        ({}, ["weights: tp3 does not fit"], "refused: weights: tp3 does not fit"),
        ({"TP3_PAD": "0"}, [], "off"),
    ],
)
def test_the_state_of_hooks(monkeypatch, env, problem, state):
    monkeypatch.setattr(doctor, "find_spec", lambda name: name)
    monkeypatch.setattr("tp3.vllm.anchors.problems", lambda hooks: problem)
    result = told("--json", env=env)
    found = json.loads(result.stdout)["hooks"]
    assert list(found) == list(HOOKS)
    assert found["weights"] == state
    assert found["ranks_per_gpu"] == "off"
    assert result.exit_code == (1 if problem else 0)
