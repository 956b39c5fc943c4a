"""`tp3 smoke` on CPU, from options to exit code."""

import json

import pytest
import torch
from click.testing import CliRunner

from tp3.cli.main import main

torch.set_num_threads(1)  # ranks are forked, and a pool of threads does not survive that


@pytest.fixture
def smoke(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    return lambda *arguments: CliRunner().invoke(main, ["smoke", *arguments])


def test_json(smoke):
    result = smoke("--world-size", "2", "--json")
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    rows = record.pop("rows")
    assert record == {"world_size": 2, "device": "cpu", "num_gpus": 0, "mps": False, "ok": True}
    checks = [row["check"] for row in rows]
    assert len(checks) == len(set(checks)) == 41
    for check in ("send/recv bfloat16 80 KiB", "all_reduce ranks", "model tokens"):
        assert check in checks
    assert "collectives on 2 ranks" in result.stderr


def test_table_and_a_check_that_fails(smoke, monkeypatch):
    row = {"check": "a check", "detail": "a detail", "value": 2.0, "ok": False}
    for name in ("collectives.run_collectives", "repeats.run_repeats", "model.run_model"):
        monkeypatch.setattr(f"tp3.smoke.{name}", lambda world_size, **options: [row])
    result = smoke("--world-size", "2")
    assert result.exit_code == 1
    assert "tp3 smoke: 2 ranks on cpu" in result.stdout
    assert "FAILED" in result.stdout
    assert "0 of 3 checks held" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--world-size", "17"], "world size must be in 1..16, got 17"),
        (["--device", "tpu"], "device must be auto, cpu, cuda, got 'tpu'"),
        (["--device", "cuda"], "device cuda needs a GPU, but torch"),
        (["--mps"], "MPS needs a GPU, but torch"),
        (["--mps", "--device", "cpu"], "MPS shares GPUs, got device 'cpu'; leave one"),
        (["--model", "/nowhere"], "/nowhere"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_sentence(smoke, arguments, sentence):
    result = smoke(*arguments)
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert result.stdout == ""
