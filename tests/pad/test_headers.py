"""Headers of safetensors files: what they say, and every kind of damage as one sentence."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from tests.pad.folders import INDEX, save, shapes
from tp3.pad.headers import Stored, encode_header, num_bytes, read_header, read_headers

TENSORS = {
    "a": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
    "b": torch.zeros(0, 4),
    "c": torch.tensor(7, dtype=torch.int64),
    "d": torch.ones(3).to(torch.float8_e4m3fn),
}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "some.safetensors"
    save_file(TENSORS, path, metadata={"format": "pt"})
    return path


def test_what_a_header_says(file):
    header = read_header(file)
    assert {name: (t.dtype, t.shape) for name, t in header.tensors.items()} == {
        "a": ("BF16", (2, 3)),
        "b": ("F32", (0, 4)),
        "c": ("I64", ()),
        "d": ("F8_E4M3", (3,)),
    }
    assert header.metadata == {"format": "pt"}
    data = file.read_bytes()[header.data_at :]
    begin, end = header.tensors["a"][2:]
    assert data[begin:end] == TENSORS["a"].view(torch.uint8).numpy().tobytes()


def test_an_encoded_header_is_read_back(tmp_path):
    tensors = {"ä": Stored("F4", (3, 2), 0, 3), "z": Stored("U8", (5,), 3, 8)}
    head = encode_header(tensors, {"format": "pt"})
    (tmp_path / "x").write_bytes(head + b"\0" * 8)
    header = read_header(tmp_path / "x")
    assert (header.tensors, header.metadata) == (tensors, {"format": "pt"})
    assert header.data_at % 8 == 0


def with_header(values, data=b"\0" * 8):
    text = values if isinstance(values, bytes) else json.dumps(values).encode()
    return len(text).to_bytes(8, "little") + text + data


def tensor(dtype="U8", shape=(8,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        pytest.param(b"", "does not fit in 0 bytes", id="empty"),
        pytest.param(b"abc", "does not fit in 3 bytes", id="short"),
        pytest.param(b"\xff" * 64, "does not fit in 64 bytes", id="text"),
        pytest.param(with_header(b"{no json"), "its header is not one", id="no-json"),
        pytest.param(with_header(b"\xff\xfe"), "its header is not one", id="no-utf8"),
        pytest.param(with_header([1]), "its header is not one", id="list"),
        pytest.param(with_header({"a": {}}), "its header is not one", id="no-fields"),
        pytest.param(with_header({"a": tensor(shape=(-8,))}), "not one", id="negative"),
        pytest.param(with_header({"a": tensor(offsets=(0, 8, 9))}), "not one", id="offsets"),
        pytest.param(with_header({"a": tensor("F5")}), "tensor a: dtype must be", id="dtype"),
        pytest.param(with_header({"a": tensor(["U8"])}), "header is not one", id="dtype-list"),
        pytest.param(
            with_header({"a": tensor(shape=(7,))}), "takes bytes 0 to 8, expected 0 to 7", id="size"
        ),
        pytest.param(
            with_header({"a": tensor(shape=(4,), offsets=(4, 8))}), "expected 0 to 4", id="gap"
        ),
        pytest.param(
            with_header({"a": tensor()}, b"\0" * 5), "take 8 bytes, the file has 5", id="truncated"
        ),
        pytest.param(
            with_header({"a": tensor()}, b"\0" * 9), "take 8 bytes, the file has 9", id="longer"
        ),
    ],
)
def test_damage_is_one_sentence(tmp_path, content, sentence):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=sentence) as caught:
        read_header(path)
    assert str(path) in str(caught.value)


def test_a_file_cut_at_any_byte_is_refused(file):
    whole = file.read_bytes()
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"some\.safetensors"):
            read_header(file)


def test_shards_of_a_folder(tmp_path):
    headers = read_headers(save(tmp_path))
    assert {name: t.shape for h in headers for name, t in h.tensors.items()} == shapes()
    assert len(headers) == 5


def duplicate(folder):
    (folder / "model-1.safetensors").write_bytes((folder / "model-0.safetensors").read_bytes())
    index = json.loads((folder / INDEX).read_text())
    placed = index["weight_map"]
    index["weight_map"] = {n: f for n, f in placed.items() if ".layers.1." not in n}
    index["weight_map"]["model.layers.0.mlp.up_proj.weight"] = "model-1.safetensors"
    (folder / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda f: (f / INDEX).write_text('{"weight_map": {}}'), "weight_map of file names"),
        (lambda f: (f / INDEX).write_text('{"weight_map": {"a": 1}}'), "weight_map of file names"),
        (lambda f: (f / INDEX).write_text('{"weight_map": {"a": "../x"}}'), "own folder"),
        (lambda f: (f / "model-norms.safetensors").unlink(), "norms.safetensors does not exist"),
        (duplicate, r"model.layers.0.mlp.* is in model-0.safetensors and in model-1.safetensors"),
    ],
)
def test_a_bad_folder_is_one_sentence(tmp_path, damage, sentence):
    save(tmp_path)
    damage(tmp_path)
    with pytest.raises(ValueError, match=sentence):
        read_headers(tmp_path)


def test_num_bytes():
    assert num_bytes("F4", (3, 3)) == 5
    assert num_bytes("BF16", ()) == 2


def test_torch_is_not_imported():
    code = "import sys, tp3.pad.headers; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
