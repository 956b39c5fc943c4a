"""What hooks refuse, and what they switch, on objects such as vLLM's."""

from types import SimpleNamespace

import pytest

from tests.pad import folders
from tp3.pad import read_config
from tp3.vllm import backend, config, ranks_per_gpu, vision, weights
from tp3.vllm.plans import engine_plan
from tp3.vllm.settings import Settings


def tower(heads=16, *, mode="weights", whole=True, language=False):
    """A multimodal model config with a vision tower."""
    return SimpleNamespace(
        model="model",
        hf_config=SimpleNamespace(vision_config=SimpleNamespace(num_heads=heads)),
        multimodal_config=SimpleNamespace(mm_encoder_tp_mode=mode, language_model_only=language),
        _model_info=SimpleNamespace(supports_multimodal_encoder_tp_data=whole),
    )


@pytest.mark.parametrize(
    ("held", "tp", "mode"),
    [
        (tower(), 3, "data"),
        (tower(), 4, "weights"),
        (tower(15), 3, "weights"),
        (tower(whole=False), 4, "weights"),
        (tower(whole=False, language=True), 3, "weights"),
        (tower(whole=False, mode="data"), 3, "data"),
    ],
)
def test_a_tower_that_does_not_divide_runs_whole(held, tp, mode):
    vision.switch(held, tp)
    assert held.multimodal_config.mm_encoder_tp_mode == mode


def test_a_tower_that_can_only_be_cut_is_refused():
    with pytest.raises(ValueError, match="16 heads, which 3 ranks do not divide"):
        vision.switch(tower(whole=False), 3)


def test_a_model_without_a_tower_is_left_alone():
    vision.switch(SimpleNamespace(hf_config=SimpleNamespace(), multimodal_config=None), 3)


@pytest.mark.parametrize("name", weights.FORMATS)
def test_loaders_that_the_stream_passes_through(name):
    weights.check_format(name)


def test_another_loader_is_refused():
    with pytest.raises(ValueError, match="--load-format gguf; allowed: auto, "):
        weights.check_format("gguf")


def test_headers_are_compared_before_anything_starts(tmp_path, monkeypatch):
    folder = tmp_path / "model"
    tensors = folders.weights()
    folders.save(folder, tensors)
    planned = engine_plan(read_config(folder), 3)
    weights.check_headers(str(folder), planned, strict=True)
    weights.check_headers(str(tmp_path), planned, strict=True)  # no weights here: a hub id

    tensors["model.layers.0.mlp.other.weight"] = tensors["model.norm.weight"] + 1
    other = tmp_path / "other"
    folders.save(other, tensors, sharded=False)
    with pytest.raises(
        ValueError, match=r"other cannot be padded: tensor model.layers.0.mlp.other"
    ):
        weights.check_headers(str(other), planned, strict=True)
    told: list[object] = []
    monkeypatch.setattr(weights.logger, "warning", lambda *text: told.extend(text))
    weights.check_headers(str(other), planned, strict=False)
    assert "mlp.other.weight is not part of a llama model" in str(told[-1])


def whole(world_size=3, *, cache=None, padded=False):
    """The whole config of vLLM's, as far as the plugin asks."""
    mark = {"config": {}, "tp": world_size} if padded else None
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            world_size=world_size, disable_custom_all_reduce=False, distributed_timeout_seconds=None
        ),
        cache_config=SimpleNamespace(kv_cache_memory_bytes=cache),
        load_config=SimpleNamespace(load_format="auto"),
        lora_config=None,
        compilation_config=SimpleNamespace(pass_config=SimpleNamespace(fuse_allreduce_rms=None)),
        model_config=SimpleNamespace(model="model", hf_config=SimpleNamespace(tp3=mark)),
    )


def test_ranks_that_share_a_gpu_need_a_size_of_the_cache():
    settings = Settings(ranks_per_gpu=3)
    with pytest.raises(ValueError, match="--kv-cache-memory-bytes"):
        ranks_per_gpu.prepare(whole(), settings)
    ranks_per_gpu.prepare(whole(cache=1 << 30), settings)
    ranks_per_gpu.prepare(whole(1), settings)
    ranks_per_gpu.prepare(whole(), Settings())


@pytest.mark.parametrize(
    ("held", "settings", "ours"),
    [
        (whole(padded=True), Settings(), True),
        (whole(), Settings(), False),
        (whole(), Settings(backend="r4d"), True),
        (whole(1), Settings(backend="r4d"), False),
        (whole(padded=True), Settings(backend="default"), False),
    ],
)
def test_what_would_pass_r4d_by_is_switched_off(held, settings, ours):
    backend.prepare(held, settings)
    assert held.parallel_config.disable_custom_all_reduce == ours
    assert (held.compilation_config.pass_config.fuse_allreduce_rms is False) == ours
    assert held.parallel_config.distributed_timeout_seconds == (600 if ours else None)


def test_a_timeout_that_was_asked_for_stays():
    held = whole(padded=True)
    held.parallel_config.distributed_timeout_seconds = 25
    backend.prepare(held, Settings())
    assert held.parallel_config.distributed_timeout_seconds == 25


def test_adapters_of_other_sizes_are_refused():
    made = whole(padded=True)
    config.prepare(made, Settings())
    made.lora_config = object()
    with pytest.raises(ValueError, match="LoRA adapters have the sizes that it was trained with"):
        config.prepare(made, Settings())
    stock = whole()
    stock.lora_config = object()
    config.prepare(stock, Settings())
