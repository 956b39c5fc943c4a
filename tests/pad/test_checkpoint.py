"""Reading a checkpoint folder: single file or shards, and damage found before the first tensor."""

import json

import pytest
import torch
from safetensors.torch import save_file

from tp3.pad import read_weights
from tp3.smoke.source import RandomLlama

SOURCE = RandomLlama()
SHARDS = "model.safetensors.index.json"


def save_sharded(folder, weights):
    names = list(weights)
    parts = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: weights[name] for name in part}, folder / file)
    placed = {name: file for file, part in parts.items() for name in part}
    (folder / SHARDS).write_text(json.dumps({"weight_map": placed}))


def test_single_and_sharded_folders_read_alike(tmp_path):
    stock = dict(SOURCE.weights())
    single, sharded = tmp_path / "single", tmp_path / "sharded"
    single.mkdir()
    sharded.mkdir()
    save_file(stock, single / "model.safetensors")
    save_sharded(sharded, stock)
    for folder in (single, sharded):
        read = dict(read_weights(folder))
        assert read.keys() == stock.keys()
        assert all(torch.equal(read[name], stock[name]) for name in stock)


def truncate(folder):
    data = (folder / "two.safetensors").read_bytes()
    (folder / "two.safetensors").write_bytes(data[: len(data) // 2])


def misplace(folder):
    index = (folder / SHARDS).read_text()
    (folder / SHARDS).write_text(index.replace("one.safetensors", "two.safetensors"))


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (truncate, r"two.safetensors is not a whole safetensors file"),
        (lambda folder: (folder / "two.safetensors").unlink(), "two.safetensors does not exist"),
        (lambda folder: (folder / SHARDS).unlink(), "has neither model.safetensors nor"),
        (lambda folder: (folder / SHARDS).write_text("{}"), "JSON with an object weight_map"),
        (misplace, "two.safetensors lacks the tensor model.embed_tokens.weight"),
    ],
)
def test_a_damaged_folder_is_refused_before_the_first_tensor(tmp_path, damage, sentence):
    save_sharded(tmp_path, dict(SOURCE.weights()))
    damage(tmp_path)
    with pytest.raises(ValueError, match=sentence):
        read_weights(tmp_path)


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match="nowhere is not a folder"):
        read_weights(tmp_path / "nowhere")
