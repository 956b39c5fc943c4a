"""From ``quantization_config`` to blocks, bits and who is ignored; what is refused, and why."""

import pytest

from tp3.pad.formats import Format, Names, read_format
from tp3.pad.model import Rule
from tp3.pad.planner import plan

Q_PROJ = Rule("model.layers.*.self_attn.q_proj.weight", ("q_heads*head_dim", "hidden"))
GATE = Rule("model.layers.*.mlp.gate.weight", ("experts", "hidden"))
EXPERT = Rule("model.layers.*.mlp.experts.#.up_proj.weight", ("moe_intermediate", "hidden"))
STACKED = "model.layers.*.mlp.experts."
NORM = Rule("model.norm.weight", ("hidden",))


def read(layers=2, **values):
    return read_format({"num_hidden_layers": layers, "quantization_config": values})


def group(targets=("Linear",), **weights):
    return {"targets": list(targets), "weights": weights}


def ct(layout, *groups, **values):
    groups = {f"group_{number}": each for number, each in enumerate(groups)}
    return read(quant_method="compressed-tensors", format=layout, config_groups=groups, **values)


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}


@pytest.mark.parametrize(
    ("form", "blocks"),
    [
        (read_format({}), (1, 1)),
        (read(quant_method="fp8"), (1, 16)),
        (read(quant_method="fp8", weight_block_size=[128, 128]), (128, 128)),
        (read(quant_method="fp8", weight_block_size=[32, 32]), (32, 32)),
        (Format("fp8", 128, 128, 8), (128, 128)),
        (read(quant_method="mxfp4"), (1, 32)),
        (read(quant_method="modelopt", quant_algo="NVFP4"), (1, 16)),
        (read(quant_method="modelopt", quant_algo="FP8"), (1, 16)),
        (read(quant_algo="FP8"), (1, 16)),
        (read(quant_method="gptq", bits=4, group_size=128), (64, 128)),
        (read(quant_method="gptq", bits=4, group_size=-1), (64, 128)),
        (read(quant_method="awq", bits=4, group_size=64), (64, 128)),
        (ct("pack-quantized", group(**INT4)), (64, 128)),
        (ct("float-quantized", group(num_bits=8, type="float", strategy="channel")), (1, 16)),
        (ct("nvfp4-pack-quantized", group(num_bits=4, type="float", group_size=16)), (1, 16)),
        (ct("mxfp4-pack-quantized", group(num_bits=4, type="float", group_size=32)), (1, 32)),
        (
            ct("float-quantized", group(num_bits=8, type="float", strategy="block",
                                        block_structure=[64, 128])),
            (64, 128),
        ),
    ],
)  # fmt: skip
def test_blocks_that_a_rank_needs_whole(form, blocks):
    assert form.blocks(Q_PROJ) == blocks
    assert form.blocks(NORM) == (1,)


@pytest.mark.parametrize(
    ("name", "dims", "blocks"),
    [
        ("gate_up_proj", ("2*width", "hidden"), (1, 1, 32)),
        ("gate_up_proj", ("hidden", "2*width"), (1, 32, 1)),
        ("down_proj", ("hidden", "width"), (1, 1, 32)),
        ("down_proj", ("width", "hidden"), (1, 32, 1)),
    ],
)
def test_stacked_experts_may_lie_transposed(name, dims, blocks):
    form = read(quant_method="mxfp4")
    assert form.blocks(Rule(STACKED + name, ("experts", *dims))) == blocks


@pytest.mark.parametrize(
    ("ignored", "plain"),
    [
        (["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"], True),
        (["model.layers.0.self_attn.q_proj"], False),
        (["model.layers.*.self_attn"], True),
        (["self_attn"], True),
        (["self_attn.q"], False),
        (["model.layers.*self_attn*"], True),
        (["*.attn.*"], False),
        (["re:.*self_attn.*"], True),
        (["re:self_attn"], False),
        (["model.layers.0*", "model.layers.1.*"], True),
        (["lm_head"], False),
    ],
)
def test_a_rule_is_plain_where_every_layer_is_ignored(ignored, plain):
    for key in ("ignore", "exclude_modules", "modules_to_not_convert"):
        form = read(quant_method="modelopt", quant_algo="NVFP4", **{key: ignored})
        assert form.quantises(Q_PROJ, range(2)) is not plain


def test_a_gate_is_not_a_gate_proj():
    names = Names(("gate", "e_score_correction_bias"))
    assert names.match("model.layers.0.mlp.gate")
    assert not names.match("model.layers.0.mlp.gate_proj")
    form = read(quant_method="fp8", modules_to_not_convert=["gate"])
    assert form.quantises(EXPERT)
    assert not form.quantises(GATE)


def test_mixed_precision_tells_modules_apart():
    layers = {f"model.layers.{n}.self_attn.q_proj": {"quant_algo": "FP8"} for n in range(2)}
    layers |= {f"model.layers.{n}.mlp.experts": {"quant_algo": "NVFP4"} for n in range(2)}
    form = read(quant_method="modelopt", quant_algo="MIXED_PRECISION", quantized_layers=layers)
    assert form.of("model.layers.1.self_attn.q_proj").name == "fp8"
    assert form.of("model.layers.1.mlp.experts.3.up_proj").name == "nvfp4"
    assert form.of("model.layers.1.self_attn.o_proj").name == "plain"
    assert [form.bits_of(rule) for rule in (Q_PROJ, EXPERT, GATE)] == [8, 4.5, 16]


def test_groups_of_compressed_tensors_tell_modules_apart():
    fp8 = group(["re:.*self_attn.*"], num_bits=8, type="float", strategy="channel")
    form = ct("mixed-precision", fp8, group(**INT4) | {"format": "pack-quantized"})
    assert form.of("model.layers.0.self_attn.q_proj").name == "fp8"
    assert form.of("model.layers.0.mlp.up_proj").name == "packed"


def test_modelopt_may_speak_from_a_file_of_its_own():
    content = {"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["*self_attn*"]}}
    form = read_format({"num_hidden_layers": 1}, content)
    assert form.name == "nvfp4"
    assert not form.quantises(Q_PROJ)


def test_experts_in_fp4_beside_fp8():
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    form = read_format(config | {"expert_dtype": "fp4"})
    assert form.of("layers.0.ffn.experts.3.w1").name == "mxfp4"
    assert form.of("layers.0.ffn.shared_experts.w1").name == "fp8"


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"quant_method": "bitsandbytes"}, "bitsandbytes cannot be padded: its blocks run over"),
        ({"quant_method": "gguf"}, "gguf cannot be padded: .*convert it to safetensors"),
        ({"quant_method": "exl3"}, "exl3 cannot be padded: its Hadamard transform mixes 128"),
        ({"quant_method": "nf5"}, "quant_method must be one of fp8, .*got 'nf5'"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo must be .*'W4A8_AWQ'"),
        ({"quant_method": "gptq", "bits": 3}, "gptq must have 2 or 4 or 8 bits .* got 3"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:x": {}}}, "of different bits"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "must be gemm .* got 'gemv'"),
        ({"quant_method": "compressed-tensors"}, "config_groups is missing"),
    ],
)
def test_what_cannot_be_padded_is_refused_with_a_reason(values, sentence):
    with pytest.raises(ValueError, match=sentence):
        read(**values)


QWEN_27B_MLP = {
    "model_type": "llama", "hidden_size": 5120, "intermediate_size": 17408,
    "num_hidden_layers": 1, "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256,
    "vocab_size": 248320,
}  # fmt: skip
FAILURES = [
    ("nvfp4", 17408, {"quant_method": "modelopt", "quant_algo": "NVFP4"}, 3, 17424),
    ("mxfp4", 17408, {"quant_method": "mxfp4"}, 3, 17472),
    ("fp8-blocks", 17408, {"quant_method": "fp8", "weight_block_size": [128, 128]}, 3, 17664),
    ("awq-231-groups", 29568, {"quant_method": "awq", "bits": 4, "group_size": 128}, 2, 29696),
    ("nvfp4-1856", 1856, {"quant_method": "modelopt", "quant_algo": "NVFP4"}, 8, 1920),
    ("marlin-10944", 10944, {"quant_method": "gptq", "bits": 4, "group_size": 64}, 2, 11008),
    ("fp8-1536", 1536, {"quant_method": "fp8", "weight_block_size": [128, 128]}, 8, 2048),
    ("bf16", 17408, {}, 3, 17424),
]


@pytest.mark.parametrize(
    ("width", "quantisation", "tp", "padded"),
    [f[1:] for f in FAILURES],
    ids=[f[0] for f in FAILURES],
)
def test_published_widths(width, quantisation, tp, padded):
    config = QWEN_27B_MLP | {"intermediate_size": width, "quantization_config": quantisation}
    assert plan(config, tp=tp).padded_sizes["intermediate"] == padded
