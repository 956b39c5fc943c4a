"""`tp3 plan`, `check`, `pad` and `verify`: what they print, their exit codes, a real model."""

import json
import shutil
import sys

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.pad.folders import CONFIG, INDEX, save
from tp3.cli.main import main

TARGET = {
    **CONFIG,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "intermediate_size": 17408,
    "hidden_size": 5120,
    "vocab_size": 248320,
    "num_hidden_layers": 16,
}
DRAFT = TARGET | {
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_hidden_layers": 5,
}


def tp3(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def sizes(record):
    return {axis["name"]: axis["padded"] for axis in record["axes"]}


@pytest.fixture
def configs(tmp_path):
    made = []
    for name, config in (("target", TARGET), ("draft", DRAFT)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        made.append(tmp_path / name)
    return made


def test_plan_as_json(configs):
    result = tp3("plan", configs[0], "--tp", 3, "--json")
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert {key: record[key] for key in ("model_type", "tp", "strategy")} == {
        "model_type": "llama",
        "tp": 3,
        "strategy": "append",
    }
    assert record["axes"][0].keys() == {"name", "stock", "padded", "per_rank", "reason"}
    assert sizes(record) == {
        "q_heads": 36,
        "kv_heads": 6,
        "intermediate": 17424,
        "vocab": 248448,
    }
    assert record["per_rank"]["kv_bytes_per_token"] == 16 * 2 * 2 * 2 * 256
    assert record["per_rank"]["weight_bytes"] > 0
    assert 0 < record["overhead"] < 0.1
    assert any(text.startswith("split-group 24/12") for text in record["rejected"])


def test_plan_as_a_table(configs):
    result = tp3("plan", configs[0] / "config.json", "--strategy", "split-group")
    assert result.exit_code == 0, result.output
    for word in ("kv_heads", "248448", "bytes of cache per token"):
        assert word in result.stdout


@pytest.mark.parametrize(
    ("options", "heads"),
    [
        ((), (36, 9)),
        (("--like", "target"), (48, 12)),
        (("--also-tp", 6), (48, 12)),
    ],
    ids=["alone", "like", "also"],
)
def test_a_drafter_with_the_cache_of_its_target(configs, options, heads):
    options = [configs[0] if option == "target" else option for option in options]
    result = tp3("plan", configs[1], "--json", *options)
    padded = sizes(json.loads(result.stdout))
    assert (padded["q_heads"], padded["kv_heads"]) == heads


def test_a_drafter_beside_its_target(configs):
    result = tp3("plan", configs[0], "--draft", configs[1], "--json")
    record = json.loads(result.stdout)
    assert sizes(record)["kv_heads"] * 256 == sizes(record["draft"])["kv_heads"] * 128
    assert sizes(record["draft"])["q_heads"] == 48
    table = tp3("plan", configs[0], "--draft", configs[1])
    assert table.stdout.count("bytes of cache per token") >= 2


def test_a_local_multiple(configs):
    options = ("--local-multiple", "intermediate=64", "--json")
    assert sizes(json.loads(tp3("plan", configs[0], *options).stdout))["intermediate"] == 17472


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--tp", 0), "tp must be a positive integer, got 0"),
        (("--strategy", "magic"), "strategy must be one of auto, append"),
        (("--strategy", "split-group", "--tp", 5), "split-group cannot pad 24/4 heads to 5 ranks"),
        (("--local-multiple", "width=3"), "local multiple of width: the model's axes are"),
        (("--local-multiple", "vocab"), "AXIS=K with K of 1 or more, got 'vocab'"),
        (("--local-multiple", "vocab=0"), "AXIS=K with K of 1 or more, got 'vocab=0'"),
        (("--like", "/nowhere"), "/nowhere does not exist"),
    ],
)
def test_a_plan_that_is_refused(configs, options, sentence):
    result = tp3("plan", configs[0], *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1
    assert sentence in result.stderr


def test_contradicting_caches_are_refused(configs):
    options = ("--like", configs[0], "--local-multiple", "kv_heads=3")
    result = tp3("plan", configs[1], *options)
    assert result.exit_code == 2
    assert "with 2048 bytes of cache per token and layer" in result.stderr


def test_a_hub_id_needs_the_hub(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    result = tp3("plan", "some/model")
    assert result.exit_code == 2
    assert "some/model does not exist; for models of the hub: pip install 'tp3[hub]'" in (
        result.stderr
    )


def test_check_and_pad_and_verify_a_folder(tmp_path):
    src, dst = save(tmp_path / "src"), tmp_path / "dst"
    result = tp3("check", src, "--json")
    record = json.loads(result.stdout)
    assert (result.exit_code, record["covered"], record["untouched"]) == (0, 23, 7)
    result = tp3("pad", src, dst, "--also-tp", 2)
    assert result.exit_code == 0, result.output
    assert "4 files written, 0 kept from before, 2 linked" in result.stdout
    assert "config.json says mistral" in result.stderr
    assert json.loads((dst / "config.json").read_text())["model_type"] == "mistral"
    assert "self_attn.q_proj.weight 3 × [88 → 96]" in result.stdout
    assert tp3("check", dst).stdout == "0 tensors are padded, 30 are left alone\n"
    result = tp3("verify", src, "--layers", 1, "--json")
    record = json.loads(result.stdout)
    assert (result.exit_code, record["ok"], record["wrong"]) == (0, True, [])
    assert record["error_to_fp64"] <= record["bound"]
    assert "allowed 2 ×" in tp3("verify", src, "--layers", 1).stdout


def test_check_prints_every_error(tmp_path):
    src = save(tmp_path)
    index = json.loads((src / INDEX).read_text())
    index["weight_map"] = {
        n: f for n, f in index["weight_map"].items() if f != "model-1.safetensors"
    }
    (src / INDEX).write_text(json.dumps(index))
    result = tp3("check", src)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.count("Error: tensor model.layers.1.") == 7


def remove(name):
    return lambda folder: (folder / name).unlink()


def write(name, text):
    return lambda folder: (folder / name).write_text(text)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        pytest.param(remove("config.json"), "has no config.json", id="no-config"),
        pytest.param(write("config.json", "{"), "config.json is not JSON", id="no-json"),
        pytest.param(write("config.json", "{}"), "model_type must be a string", id="empty"),
        pytest.param(write("model-0.safetensors", "x"), "is not a whole safetensors", id="header"),
        pytest.param(shutil.rmtree, "does not exist|is not a folder", id="no-folder"),
    ],
)
@pytest.mark.parametrize("command", ["check", "pad", "verify"])
def test_a_damaged_folder_is_one_sentence(tmp_path, command, damage, sentence):
    src = save(tmp_path / "src")
    damage(src)
    result = tp3(command, src, *([tmp_path / "dst"] if command == "pad" else []))
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1, result.stderr
    assert any(part in result.stderr for part in sentence.split("|"))
    assert [path.name for path in tmp_path.iterdir()] in (["src"], [])


@pytest.mark.parametrize("command", ["check", "pad"])
def test_a_folder_without_weights_is_refused(tmp_path, command):
    src = save(tmp_path / "src")
    (src / INDEX).unlink()
    result = tp3(command, src, *([tmp_path / "dst"] if command == "pad" else []))
    assert result.exit_code == 2
    assert "has neither model.safetensors nor" in result.stderr


@pytest.fixture(scope="module")
def story(smollm2):
    """A prompt, and what the stock model makes of it."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    return prompt, greedy(smollm2, prompt)


@torch.inference_mode()
def greedy(folder, prompt):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.generate(**prompt, max_new_tokens=12, do_sample=False)[0].tolist()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("size", [2, 4, 5, 7])
def test_a_real_model(smollm2, story, tmp_path, size):
    prompt, text = story
    assert (
        sizes(json.loads(tp3("plan", smollm2, "--tp", size, "--json").stdout))["kv_heads"]
        == ({2: 4, 4: 4, 5: 5, 7: 7}[size])
    )
    assert "120 tensors are padded" in tp3("check", smollm2, "--tp", size).stdout or size in (5, 7)
    dst = tmp_path / "dst"
    try:
        result = tp3("pad", smollm2, dst, "--tp", size)
        assert result.exit_code == 0, result.output
        assert (dst / "tokenizer.json").samefile(smollm2 / "tokenizer.json")
        assert greedy(dst, prompt) == text
    finally:
        shutil.rmtree(dst, ignore_errors=True)
    result = tp3("verify", smollm2, "--tp", size, "--layers", 3, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["padded_entries"] > 100_000
