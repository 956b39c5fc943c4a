"""What must fail, what must do nothing, and what must be said before a worker starts."""

from __future__ import annotations

import pytest

from tests.vllm import fleet, models

ALONE = {"VLLM_PLUGINS": ""}
ON_TWO = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
AT_ONCE = {"VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "0"}  # else the workers are waited for in vain

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return {"llama": {"model": str(models.save("llama", tmp_path_factory.mktemp("llama")))}}


@pytest.fixture(scope="module")
def stock(llama, tmp_path_factory):
    return fleet.run(tmp_path_factory.mktemp("stock"), llama, env=ALONE)["llama"]


def test_a_wrong_fill_is_seen(llama, stock, tmp_path):
    """Padded with other numbers than zero, the comparison must fail."""
    spoiled = fleet.run(tmp_path, llama, tp=3, env={"TP3_TEST_SPOIL": "1"})["llama"]
    apart, worst = fleet.differences(stock, spoiled)
    assert apart > 0
    assert worst > 1e-2


def test_a_size_that_needs_nothing_is_left_alone(llama, tmp_path):
    """Two ranks divide the model: with the plugin and without, the same to the last bit, and no
    hook has anything to say.
    """
    pair = {"llama": {**llama["llama"], **ON_TWO}}
    alone = fleet.run(tmp_path / "alone", pair, env={**ALONE, **AT_ONCE})["llama"]
    plugged = fleet.run(tmp_path / "plugged", pair, env=AT_ONCE)["llama"]
    assert plugged["answers"] == alone["answers"]
    assert plugged["mark"] is None
    log = (tmp_path / "plugged" / "rank0.log").read_text()
    assert "world_size=2" in log
    assert "backend=gloo" in log
    assert "tp3: " not in log


def test_r4d_alone(llama, stock, tmp_path):
    """Unpadded on two ranks, carried by r4d because it was asked for."""
    said = fleet.run(tmp_path, llama, tp=2, env={"TP3_PAD": "0", "TP3_BACKEND": "r4d"})["llama"]
    assert said["hooks"] == {"backend": "r4d", "communicator": "R4DCpuCommunicator"}
    assert said["mark"] is None
    assert said["stats"]["all_reduce/one-shot"] > 0
    apart, worst = fleet.differences(stock, said)
    assert (apart, worst < 1e-4) == (0, True)


def python(folder, code, **env):
    """What code prints in a process of its own."""
    fleet.ask(folder, {"code": code}, env=env)
    return (folder / "rank0.log").read_text()


CONFIG = """
from vllm.engine.arg_utils import EngineArgs
try:
    EngineArgs(model={model!r}, tensor_parallel_size={tp}, skip_tokenizer_init=True,
               dtype="float32").create_engine_config()
except ValueError as error:
    print("ValueError:", error)
else:
    print("made")
"""


def refused(folder, model, tp, **env):
    return python(folder, CONFIG.format(model=str(model), tp=tp), **env)


def test_a_model_that_cannot_be_padded_ends_at_its_config(tmp_path):
    import transformers

    config = transformers.GPT2Config(n_embd=128, n_head=8, n_layer=1, vocab_size=515)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    told = refused(tmp_path / "3", tmp_path, 3)
    assert f"tp3: {tmp_path} cannot run on 3 tensor-parallel ranks. It has 8 attention" in told
    assert "--tensor-parallel-size 1, 2, 4, 8 would divide its heads." in told
    assert "made" in refused(tmp_path / "2", tmp_path, 2)


def test_a_checkpoint_of_another_model_ends_at_its_config(llama, tmp_path):
    from safetensors.torch import load_file, save_file

    source = models.save("llama", tmp_path / "a")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.self_attn.r_proj.weight"] = tensors.pop(
        "model.layers.0.self_attn.q_proj.weight"
    )
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    assert "r_proj.weight is not part of a llama model" in refused(tmp_path / "strict", source, 3)
    assert "made" in refused(tmp_path / "lax", source, 3, TP3_STRICT="0")


def test_another_loader_is_refused(llama, tmp_path):
    code = CONFIG.replace("skip_tokenizer_init", "load_format='sharded_state', skip_tokenizer_init")
    told = python(tmp_path, code.format(model=llama["llama"]["model"], tp=3))
    assert "cannot be loaded with --load-format sharded_state" in told


def test_without_padding_vllm_refuses_itself(llama, tmp_path):
    told = refused(tmp_path, llama["llama"]["model"], 3, TP3_PAD="0")
    assert "must be divisible by tensor parallel size" in told


CHANGED = """
import importlib
module = importlib.import_module({module!r})
owner = module
for name in {folders!r}:
    owner = getattr(owner, name)
{change}
import tp3.vllm
from vllm.config.model import ModelConfig
from vllm.config.vllm import VllmConfig
from vllm.v1.worker.worker_base import WorkerBase
places = [(VllmConfig, "try_verify_and_update_config"), (WorkerBase, "__init__"),
          (ModelConfig, "verify_with_parallel_config")]
before = [getattr(*place) for place in places]
try:
    tp3.vllm.register()
except ValueError as error:
    print("ValueError:", error)
print("untouched" if before == [getattr(*place) for place in places] else "half installed")
"""


@pytest.mark.parametrize(
    ("place", "change", "told"),
    [
        (
            "vllm.platforms.interface:Platform.get_device_communicator_cls",
            "del owner.get_device_communicator_cls",
            "there is none",
        ),
        (
            "vllm.model_executor.model_loader.default_loader:DefaultModelLoader.get_all_weights",
            "owner.get_all_weights = lambda self, config: None",
            "it takes (self, config), without model_config",
        ),
        (
            "vllm.model_executor.layers.vocab_parallel_embedding:VocabParallelEmbedding.__init__",
            "owner.__init__ = lambda self, rows, columns: None",
            "it takes (self, rows, columns), without padding_size",
        ),
    ],
)
def test_a_changed_anchor_is_refused_and_nothing_is_installed(tmp_path, place, change, told):
    module, _, path = place.partition(":")
    folders = path.split(".")[:-1]
    out = python(tmp_path, CHANGED.format(module=module, folders=folders, change=change))
    assert "ValueError: " in out
    assert f"does not fit vLLM 0.32.0: at {place} {told}" in out
    assert "untouched" in out
    assert "TP3_PAD=0 TP3_BACKEND=default runs this vLLM without tp3." in out
