"""`verify` on quantised weights: the package's own reader gives the numbers that `storages` reads;
padded they are the same model; and a wrong one is seen.
"""

import json

import pytest
import torch
from safetensors.torch import save_file

from tests.pad.storages import Fp4, Fp8, Mxfp8
from tp3.pad import padded_weights, plan, read_config
from tp3.pad import verify as module
from tp3.pad.dequantise import dequantised
from tp3.pad.formats import read_format
from tp3.pad.verify import verify

torch.set_num_threads(1)
SMALL = {
    "model_type": "mistral",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "sliding_window": None,
    "vocab_size": 96,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
}
MODULES = {
    "self_attn.q_proj": (256, 64),
    "self_attn.k_proj": (64, 64),
    "self_attn.v_proj": (64, 64),
    "self_attn.o_proj": (64, 256),
    "mlp.gate_proj": (160, 64),
    "mlp.up_proj": (160, 64),
    "mlp.down_proj": (64, 160),
}


def compressed(layout, **weights):
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }


NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
CHANNEL = compressed("float-quantized", num_bits=8, type="float", strategy="channel")
FP4 = {"num_bits": 4, "type": "float"}
CASES = {
    "fp8": Fp8({"quant_method": "fp8"}),
    "fp8-channel": Fp8(CHANNEL, 1, 0),
    "fp8-blocks": Fp8({"quant_method": "fp8", "weight_block_size": [32, 32]}, 32, 32),
    "mxfp8": Mxfp8({"quant_method": "modelopt", "quant_algo": "MXFP8"}),
    "mxfp4": Fp4(compressed("mxfp4-pack-quantized", group_size=32, **FP4), 32, "weight_packed"),
    "nvfp4": Fp4(
        {"quant_method": "modelopt", "quant_algo": "NVFP4"}, 16, "weight", "weight_scale_2"
    ),
    "nvfp4-compressed": Fp4(
        compressed("nvfp4-pack-quantized", group_size=16, **FP4),
        16,
        "weight_packed",
        "weight_global_scale",
    ),
}


def written(folder, case):
    """A folder of random weights in a format, and each module's tensors."""
    generator, tensors, modules = torch.Generator().manual_seed(0), {}, {}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = torch.randn(96, 64, generator=generator)
    tensors["model.norm.weight"] = torch.ones(64)
    for layer in range(2):
        at = f"model.layers.{layer}."
        tensors |= {
            f"{at}{name}_layernorm.weight": torch.ones(64) for name in ("input", "post_attention")
        }
        for name, shape in MODULES.items():
            modules[at + name] = case.make(*shape, generator)
            tensors |= {f"{at}{name}.{end}": each for end, each in modules[at + name].items()}
    save_file(tensors, folder / "model.safetensors")
    config = SMALL | {"quantization_config": case.config}
    (folder / "config.json").write_text(json.dumps(config))
    return tensors, modules


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_numbers_are_those_of_the_second_reader(case, tmp_path):
    tensors, modules = written(tmp_path, case)
    plain = dequantised(tensors, read_format(read_config(tmp_path)))
    assert set(plain) == {
        *(f"{name}.weight" for name in modules),
        *(name for name in tensors if "norm" in name or "embed" in name or "head" in name),
    }
    for name, stored in modules.items():
        # exact but for one rounding of the scale and one of the product
        torch.testing.assert_close(
            plain[f"{name}.weight"].double(), case.read(stored), rtol=2**-22, atol=0
        )


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_quantised_folder_is_verified(case, tmp_path):
    written(tmp_path, case)
    found = verify(tmp_path, read_config(tmp_path), tp=3)
    assert found.ok, found
    assert found.zeros > 10_000
    assert found.rounding > 0


def test_mxfp4_experts_of_gpt_oss(tmp_path):
    config = SMALL | {
        "model_type": "gpt_oss",
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
        "intermediate_size": 64,
        "sliding_window": 8,
        "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    module._save_random(config, tmp_path, 0)
    from safetensors.torch import load_file

    weights = load_file(tmp_path / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for layer in range(2):
        for name, rows in (("gate_up_proj", 128), ("down_proj", 64)):
            at = f"model.layers.{layer}.mlp.experts.{name}"
            del weights[at]
            for end, shape, low, high in (
                ("_blocks", (3, rows, 2, 16), 0, 256),
                ("_scales", (3, rows, 2), 120, 126),
            ):
                weights[at + end] = torch.randint(
                    low, high, shape, generator=generator, dtype=torch.uint8
                )
    save_file(weights, tmp_path / "model.safetensors")
    config |= {"quantization_config": {"quant_method": "mxfp4"}}
    found = verify(tmp_path, config, tp=3)
    assert found.ok, found


def test_control_scales_of_other_blocks_are_seen(tmp_path, monkeypatch):
    written(tmp_path, CASES["fp8-blocks"])
    name = "model.layers.0.self_attn.q_proj.weight_scale"

    def turned(weights, planned):
        for key, tensor in padded_weights(weights, planned):
            yield key, tensor.roll(1, 0) if key == name else tensor

    monkeypatch.setattr(module, "padded_weights", turned)
    found = verify(tmp_path, read_config(tmp_path), tp=3)
    assert found.wrong == (name.removesuffix("_scale"),)
    assert found.error > 100 * found.bound


@pytest.mark.parametrize(
    ("quantisation", "sentence"),
    [
        (
            {"quant_method": "awq", "bits": 4, "group_size": 32},
            "verify reads .* got awq",
        ),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32}, "got gptq"),
    ],
)
def test_packed_integers_are_refused(quantisation, sentence):
    form = read_format(SMALL | {"quantization_config": quantisation})
    with pytest.raises(ValueError, match=sentence):
        dequantised({}, form)


def test_no_random_quantised_weights(tmp_path):
    config = SMALL | {"quantization_config": {"quant_method": "fp8"}}
    assert plan(config, tp=3)
    with pytest.raises(ValueError, match=r"makes plain weights, but those of .* are quantised"):
        verify(tmp_path, config, tp=3)
