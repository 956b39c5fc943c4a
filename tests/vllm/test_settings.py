"""The plugin's settings: what they allow, and when nothing is to be done."""

import subprocess
import sys

import pytest

from tp3.vllm.settings import Settings


@pytest.mark.parametrize(
    ("env", "told"),
    [
        ({"TP3_PAD": "yes"}, "TP3_PAD is 'yes'; allowed: 1, 0"),
        ({"TP3_STRICT": ""}, "TP3_STRICT is ''; allowed: 1, 0"),
        ({"TP3_KERNELS": "on"}, "TP3_KERNELS is 'on'; allowed: 1, 0"),
        ({"TP3_BACKEND": "nccl"}, "TP3_BACKEND is 'nccl'; allowed: auto, r4d, default"),
        ({"TP3_RANKS_PER_GPU": "two"}, "TP3_RANKS_PER_GPU is 'two'; it must be a whole number"),
        ({"TP3_RANKS_PER_GPU": "0"}, "TP3_RANKS_PER_GPU is 0; it must be 1 or more"),
        ({"TP3_RANKS_PER_GPU": "3", "TP3_BACKEND": "default"}, "NCCL refuses ranks that share"),
    ],
)
def test_a_wrong_setting_is_named(env, told):
    with pytest.raises(ValueError, match=told):
        Settings.from_env(env)


@pytest.mark.parametrize(
    ("env", "inert"),
    [
        ({}, False),
        ({"TP3_PAD": "0"}, True),
        ({"TP3_PAD": "0", "TP3_BACKEND": "default"}, True),
        ({"TP3_PAD": "0", "TP3_BACKEND": "r4d"}, False),
        ({"TP3_PAD": "0", "TP3_RANKS_PER_GPU": "3"}, False),
        ({"TP3_BACKEND": "default"}, False),
    ],
)
def test_inert(env, inert):
    assert Settings.from_env(env).inert == inert


@pytest.mark.parametrize(
    ("env", "padded", "stock"),
    [
        ({}, True, False),
        ({"TP3_BACKEND": "r4d"}, True, True),
        ({"TP3_BACKEND": "default"}, False, False),
        ({"TP3_RANKS_PER_GPU": "2"}, True, True),
    ],
)
def test_who_carries(env, padded, stock):
    settings = Settings.from_env(env)
    assert (settings.carries(True), settings.carries(False)) == (padded, stock)


def test_switched_off_it_imports_nothing():
    code = (
        "import sys, tp3.vllm; tp3.vllm.register(); "
        "print([n for n in ('vllm', 'torch', 'tp3.vllm.install') if n in sys.modules])"
    )
    env = {"TP3_PAD": "0", "TP3_BACKEND": "default", "PATH": ""}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=True)
    assert out.stdout.strip() == b"[]"
