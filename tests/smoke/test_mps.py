"""The MPS daemon's life, with a script on PATH in its place that writes down what it is told."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tp3.smoke import mps as mps_module
from tp3.smoke.mps import CONTROL, mps_daemon
from tp3.smoke.site import open_site

SCRIPT = f"""#!{sys.executable}
import json, os, subprocess, sys
from pathlib import Path
names = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY", "CUDA_VISIBLE_DEVICES")
asked = " ".join(sys.argv[1:]) or sys.stdin.read().strip()
folders = [os.path.isdir(os.environ[name]) for name in names[:2]]
record = dict(asked=asked, env=[os.environ.get(name) for name in names], folders=folders)
with open(os.environ["FAKE_MPS_LOG"], "a") as file:
    print(json.dumps(record), file=file)
answer = json.loads(os.environ.get("FAKE_MPS_ANSWERS", "{{}}")).get(asked, dict())
Path(os.environ[names[0]], "control").touch()
if answer.get("lingers"):  # as a daemon that keeps its output open
    subprocess.Popen(["sleep", "20"])
print(answer.get("says", ""))
sys.exit(answer.get("code", 0))
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """`fake(ASKED=ANSWER…)` sets the answers; `fake.asked()` tells what was asked."""
    script = tmp_path / "bin" / CONTROL
    script.parent.mkdir()
    script.write_text(SCRIPT)
    script.chmod(0o755)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("PATH", str(script.parent), prepend=os.pathsep)
    monkeypatch.setenv("FAKE_MPS_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/another/daemon")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))

    def answers(start=None, quit=None):
        monkeypatch.setenv("FAKE_MPS_ANSWERS", json.dumps({"-d": start or {}, "quit": quit or {}}))

    log = tmp_path / "log"
    answers.asked = lambda: [json.loads(line) for line in log.read_text().splitlines()]
    answers.folder = tmp_path / "tmp"
    return answers


def test_started_told_to_quit_and_gone(fake):
    before = dict(os.environ)
    with mps_daemon() as env:
        assert [record["asked"] for record in fake.asked()] == ["-d"]
        assert set(env) == {"CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"}
        assert all(Path(folder).is_dir() for folder in env.values())
        (folder,) = fake.folder.iterdir()
        assert folder.stat().st_mode & 0o777 == 0o700
    records = fake.asked()
    assert [record["asked"] for record in records] == ["-d", "quit"]
    for record in records:
        assert record["env"] == [*env.values(), None]  # and not CUDA_VISIBLE_DEVICES
        assert record["folders"] == [True, True]
    assert list(fake.folder.iterdir()) == []
    assert dict(os.environ) == before


def test_quit_after_a_failure(fake):
    with pytest.raises(KeyError, match="ours"), mps_daemon():
        raise KeyError("ours")
    assert [record["asked"] for record in fake.asked()] == ["-d", "quit"]
    assert list(fake.folder.iterdir()) == []


def test_a_daemon_that_keeps_its_output_open_is_not_waited_for(fake):
    fake(start={"lingers": True})
    started = time.monotonic()
    with mps_daemon():
        pass
    assert time.monotonic() - started < 10


def test_a_failing_start(fake):
    fake(start={"code": 1, "says": "Cannot find\nMPS\tcontrol"})
    with pytest.raises(ValueError, match="MPS daemon did not start") as caught, mps_daemon():
        raise AssertionError("not reached")
    assert str(caught.value) == (
        f"the MPS daemon did not start, {CONTROL} -d exited with code 1 and said "
        "'Cannot find MPS control'; check that this user may use the GPUs, or leave MPS out"
    )
    assert [record["asked"] for record in fake.asked()] == ["-d"]
    assert list(fake.folder.iterdir()) == []


def test_a_start_that_hangs(fake, monkeypatch):
    path = Path(shutil.which(CONTROL))
    path.write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(mps_module, "START_S", 0.3)
    with pytest.raises(ValueError, match=r"-d took more than 0.3 s"), mps_daemon():
        pass
    path.write_text("no program")
    with pytest.raises(ValueError, match=r"-d could not be run \(Exec format error\)"):
        mps_daemon().__enter__()
    assert list(fake.folder.iterdir()) == []


def test_a_daemon_that_does_not_end_is_told(fake):
    fake(quit={"code": 3, "says": "busy"})
    with (
        pytest.raises(RuntimeError, match=r"did not end, .* exited with code 3 and said 'busy'"),
        mps_daemon(),
    ):
        pass
    assert list(fake.folder.iterdir()) == []


def test_no_daemon_to_start(fake, monkeypatch):
    monkeypatch.setenv("PATH", str(fake.folder))
    with pytest.raises(ValueError, match=f"MPS needs {CONTROL}, which is not on PATH; it comes"):
        mps_daemon().__enter__()


def test_the_site_has_its_environment(fake, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with open_site(mps=True) as site:
        assert (site.device, site.num_gpus) == ("cuda", 1)
        assert site.mps_env["CUDA_MPS_PIPE_DIRECTORY"] == fake.asked()[0]["env"][0]
    assert [record["asked"] for record in fake.asked()] == ["-d", "quit"]


PROGRAM = """
import time
from tp3.smoke.mps import mps_daemon
with mps_daemon():
    print("there", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_signal_does_not_leave_it_behind(fake, number):
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": str(fake.folder)},
        text=True,
    )
    assert process.stdout.readline() == "there\n"
    process.send_signal(number)
    process.stdout.close()
    assert process.wait(30) != 0
    assert [record["asked"] for record in fake.asked()] == ["-d", "quit"]
    assert list(fake.folder.iterdir()) == []
