"""A padded copy of a folder: what is written, what is linked, and what a kill leaves behind."""

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.pad.folders import CONFIG, INDEX, save, weights
from tp3.pad import padded_weights, plan, read_config, read_weights
from tp3.pad.check import check
from tp3.pad.headers import read_headers
from tp3.pad.offline import pad_checkpoint

PLANNED = plan(CONFIG, tp=3)


def pad(src, dst, planned=PLANNED, **options):
    return pad_checkpoint(src, dst, read_config(src), planned, **options)


def digests(folder):
    return {
        str(path.relative_to(folder)): (
            hashlib.sha256(path.read_bytes()).hexdigest(),
            path.stat().st_mtime_ns,
        )
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture
def src(tmp_path):
    return save(tmp_path / "src")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sharded", [False, True], ids=["single", "sharded"])
def test_the_folder_holds_what_the_stream_gives(tmp_path, dtype, sharded):
    src, dst = save(tmp_path / "src", weights(dtype), sharded=sharded), tmp_path / "dst"
    before = digests(src)
    told = []
    done = pad(src, dst, progress=lambda *bytes_done: told.append(bytes_done))
    assert digests(src) == before
    written = dict(read_weights(dst))
    expected = dict(padded_weights(read_weights(src), PLANNED))
    assert list(written) == list(expected)
    for name, tensor in expected.items():
        assert written[name].dtype == dtype
        assert torch.equal(written[name], tensor), name
    assert (done.written, done.resumed, done.left_out) == (4 if sharded else 1, 0, ())
    assert "self_attn.q_proj.weight 3 × [88 → 96]" in done.lines
    assert told[0][0] == 0
    assert (
        told[-1][0]
        == told[-1][1]
        == sum(
            file.stat().st_size for file in dst.glob("*.safetensors") if "norms" not in file.name
        )
    )
    assert not list(tmp_path.glob("*.partial"))
    assert {path.name for path in dst.iterdir()} == {path.name for path in src.iterdir()}


def test_the_config_says_the_padded_sizes_and_keeps_the_trained_ones(src, tmp_path):
    pad(src, tmp_path / "dst")
    config = read_config(tmp_path / "dst")
    assert (config["num_attention_heads"], config["head_dim"]) == (24, 4)
    assert config["tp3"]["stock"]["num_attention_heads"] == 22
    again = plan({key: value for key, value in config.items() if key != "tp3"}, tp=3)
    assert again.inert
    assert not check(read_headers(tmp_path / "dst"), again).errors


def test_what_needs_no_padding_is_linked(src, tmp_path):
    (src / "extra").mkdir()
    (src / "extra" / "notes.txt").write_text("beside")
    (src / "pytorch_model.bin").write_text("other weights")
    (src / ".cache").mkdir()
    (src / ".cache" / "x").write_text("")
    done = pad(src, tmp_path / "dst")
    for name in ("model-norms.safetensors", "tokenizer.json", "extra/notes.txt"):
        assert (tmp_path / "dst" / name).samefile(src / name), name
    assert not (tmp_path / "dst" / "config.json").samefile(src / "config.json")
    assert done.left_out == ("pytorch_model.bin",)
    assert not (tmp_path / "dst" / ".cache").exists()


def test_symbolic_links_of_a_hub_cache_are_followed(src, tmp_path):
    cache = tmp_path / "cache"
    cache.mkdir()
    for path in src.iterdir():
        (cache / path.name).symlink_to(path)
    pad(cache, tmp_path / "dst")
    linked = tmp_path / "dst" / "tokenizer.json"
    assert linked.samefile(src / "tokenizer.json")
    assert not linked.is_symlink()


def test_across_filesystems_files_are_copied(src, tmp_path, monkeypatch):
    def other_device(*_):
        raise OSError(errno.EXDEV, "another filesystem")

    monkeypatch.setattr(os, "link", other_device)
    pad(src, tmp_path / "dst")
    copy, original = tmp_path / "dst" / "tokenizer.json", src / "tokenizer.json"
    assert not copy.samefile(original)
    assert copy.read_bytes() == original.read_bytes()


def test_the_index_says_the_new_size(src, tmp_path):
    pad(src, tmp_path / "dst")
    index = json.loads((tmp_path / "dst" / INDEX).read_text())
    assert index["weight_map"] == json.loads((src / INDEX).read_text())["weight_map"]
    total = sum(tensor.nbytes for _, tensor in read_weights(tmp_path / "dst"))
    assert index["metadata"] == {"total_size": total}


def test_a_plan_that_changes_nothing_links_everything(src, tmp_path):
    done = pad(src, tmp_path / "dst", plan(CONFIG, tp=1))
    assert (done.written, done.linked) == (0, len(list(src.iterdir())))
    assert all((tmp_path / "dst" / path.name).samefile(path) for path in src.iterdir())


def test_copied_heads(tmp_path):
    config = CONFIG | {"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 4}
    tensors = {
        name: tensor[: 8 if ".k_proj" in name or ".v_proj" in name else 64]
        if "q_proj" in name or "k_proj" in name or "v_proj" in name
        else tensor[:, :64].contiguous() if "o_proj" in name else tensor
        for name, tensor in weights().items()
    }  # fmt: skip
    src, planned = (
        save(tmp_path / "src", tensors, config=config),
        plan(config, tp=6, strategy="in-group"),
    )
    assert planned.padded_sizes["q_heads"] == 18
    pad(src, tmp_path / "dst", planned)
    key = dict(read_weights(tmp_path / "dst"))["model.layers.0.self_attn.k_proj.weight"]
    stock = tensors["model.layers.0.self_attn.k_proj.weight"]
    assert torch.equal(key, stock.reshape(2, 1, 4, 88).expand(2, 3, 4, 88).reshape(24, 88))


KILLED = """
import os, signal, sys
from tp3.pad import plan, read_config
from tp3.pad.offline import pad_checkpoint

src, dst, limit = sys.argv[1], sys.argv[2], int(sys.argv[3])

def progress(done, total):
    if done >= limit:
        os.kill(os.getpid(), signal.SIGKILL)

config = read_config(src)
pad_checkpoint(src, dst, config, plan(config, tp=3), progress=progress)
"""


@pytest.mark.parametrize("share", [0, 0.3, 0.7, 1])
def test_a_killed_run_goes_on_where_it_stopped(src, tmp_path, share):
    before = digests(src)
    pad(src, tmp_path / "whole")
    total = sum(
        path.stat().st_size
        for path in (tmp_path / "whole").glob("*.safetensors")
        if "norms" not in path.name
    )
    dst, partial = tmp_path / "dst", tmp_path / "dst.partial"
    command = [sys.executable, "-c", KILLED, str(src), str(dst), str(int(share * total))]
    assert subprocess.run(command).returncode == -signal.SIGKILL
    assert digests(src) == before
    assert not dst.exists()
    finished = {path.name: path.stat().st_ino for path in partial.glob("*.safetensors")}
    assert ("model-0.safetensors" in finished) == (share > 0.3)
    done = pad(src, dst)
    assert digests(src) == before
    assert {name: (dst / name).stat().st_ino for name in finished} == finished
    assert done.resumed == len(finished.keys() - {"model-norms.safetensors"})
    assert not partial.exists()
    whole = {name: digest for name, (digest, _) in digests(tmp_path / "whole").items()}
    assert {name: digest for name, (digest, _) in digests(dst).items()} == whole


def killed(src, tmp_path):
    command = [sys.executable, "-c", KILLED, str(src), str(tmp_path / "dst"), "100000"]
    assert subprocess.run(command).returncode == -signal.SIGKILL


def test_what_another_run_left_is_refused(src, tmp_path):
    killed(src, tmp_path)
    with pytest.raises(ValueError, match="partial is left from another run"):
        pad(src, tmp_path / "dst", plan(CONFIG, tp=5))
    os.utime(src / "model-0.safetensors", (1, 1))
    with pytest.raises(ValueError, match="partial is left from another run"):
        pad(src, tmp_path / "dst")


def test_two_runs_at_once_are_refused(src, tmp_path):
    refused = []

    def second(done, total):
        if not refused:
            with pytest.raises(ValueError, match="partial is being written by another run"):
                pad(src, tmp_path / "dst")
            refused.append(done)

    pad(src, tmp_path / "dst", progress=second)
    assert refused == [0]


def test_free_space_is_checked_first(src, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=10, f_frsize=4096))
    with pytest.raises(ValueError, match=r"has 40960 bytes free, the padded checkpoint needs \d+"):
        pad(src, tmp_path / "dst")
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def truncate(src):
    data = (src / "model-0.safetensors").read_bytes()
    (src / "model-0.safetensors").write_bytes(data[:-1])


def rename(src):
    tensors = load_file(src / "model-norms.safetensors")
    tensors["model.norm.scale"] = tensors["model.norm.weight"].clone()
    save_file(tensors, src / "model-norms.safetensors")


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda src: (src.parent / "dst").mkdir(), "dst exists already"),
        (truncate, "model-0.safetensors is not a whole safetensors file"),
        (rename, "tensor model.norm.scale is not part"),
        (lambda src: (src / INDEX).unlink(), "has neither model.safetensors nor"),
        (
            lambda src: (src / "config.json").write_text(json.dumps(CONFIG | {"tp3": {}})),
            "is padded already",
        ),
        (lambda src: (src.parent / "dst.partial").write_text(""), "dst.partial is not a folder"),
    ],
)
def test_bad_input_writes_nothing(src, tmp_path, damage, sentence):
    damage(src)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    with pytest.raises(ValueError, match=sentence):
        pad(src, tmp_path / "dst")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize(
    ("dst", "sentence"), [("src/dst", "lies in"), ("no/dst", "no is not a folder")]
)
def test_a_place_that_will_not_do(src, tmp_path, dst, sentence):
    with pytest.raises(ValueError, match=sentence):
        pad(src, tmp_path / dst)
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def test_a_file_that_is_no_folder(tmp_path):
    (tmp_path / "src").write_text("")
    with pytest.raises(ValueError, match="src is not a folder"):
        pad_checkpoint(tmp_path / "src", tmp_path / "dst", CONFIG, PLANNED)


def test_one_copy_serves_several_sizes(src, tmp_path):
    several = plan(CONFIG, tp=3, also_tp=(2, 4))
    pad(src, tmp_path / "dst", several)
    config = read_config(tmp_path / "dst")
    assert config["tp3"]["also_tp"] == [2, 4]
    for tp in (2, 3, 4):
        assert plan(config, tp=tp).inert
    assert config["num_key_value_heads"] == 12
