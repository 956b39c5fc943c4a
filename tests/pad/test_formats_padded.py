"""A small checkpoint of each format, padded, read by a second implementation: the trained weight
where it was, zeros elsewhere, and scales that no kernel stumbles over.
"""

import pytest
import torch

from tests.pad.storages import E2M1, Awq, Fp4, Fp8, Gptq, Mxfp8, Packed, nibbles
from tp3.pad import padded_weights, plan
from tp3.pad.catalogue import Catalogue
from tp3.pad.weights import pad_tensor

SMALL = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 640,
    "num_hidden_layers": 1,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 100,
    "tie_word_embeddings": True,
}
LAYER = "model.layers.0."
MODULES = {
    "self_attn.q_proj": ("q_heads", None),
    "self_attn.k_proj": ("kv_heads", None),
    "self_attn.v_proj": ("kv_heads", None),
    "self_attn.o_proj": (None, "q_heads"),
    "mlp.gate_proj": ("intermediate", None),
    "mlp.up_proj": ("intermediate", None),
    "mlp.down_proj": (None, "intermediate"),
}
PLAIN = {
    "model.embed_tokens.weight": (100, 128),
    "model.norm.weight": (128,),
    LAYER + "input_layernorm.weight": (128,),
    LAYER + "post_attention_layernorm.weight": (128,),
}


def compressed(layout, **weights):
    group = {"targets": ["Linear"], "weights": weights}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def gptq(**values):
    return {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True} | values


MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
CT_NVFP4 = compressed("nvfp4-pack-quantized", num_bits=4, type="float", group_size=16)
CT_MXFP4 = compressed("mxfp4-pack-quantized", num_bits=4, type="float", group_size=32)
CT_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
CASES = {
    "fp8-tensor": Fp8({"quant_method": "fp8"}),
    "fp8-modelopt": Fp8({"quant_method": "modelopt", "quant_algo": "FP8"}),
    "fp8-channel": Fp8(
        compressed("float-quantized", num_bits=8, type="float", strategy="channel"), 1, 0
    ),
    "fp8-blocks": Fp8(
        {"quant_method": "fp8", "weight_block_size": [128, 128]}, 128, 128, "weight_scale_inv", ()
    ),
    "fp8-small-blocks": Fp8({"quant_method": "fp8", "weight_block_size": [32, 32]}, 32, 32),
    "fp8-blocks-modelopt": Fp8(
        {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, 128, 128, extra=(), spaced=True
    ),
    "mxfp8": Mxfp8({"quant_method": "modelopt", "quant_algo": "MXFP8"}),
    "mxfp4": Fp4({"quant_method": "mxfp4"}, 32),
    "mxfp4-compressed": Fp4(CT_MXFP4, 32, "weight_packed"),
    "nvfp4": Fp4(MODELOPT, 16, "weight", "weight_scale_2"),
    "nvfp4-compressed": Fp4(CT_NVFP4, 16, "weight_packed", "weight_global_scale"),
    "gptq": Gptq(gptq()),
    "gptq-v2": Gptq(gptq(checkpoint_format="gptq_v2"), offset=0),
    "gptq-8-bits": Gptq(gptq(bits=8), bits=8),
    "gptq-asymmetric": Gptq(gptq(sym=False), symmetric=False),
    "gptq-act-order": Gptq(gptq(desc_act=True), act_order=True),
    "gptq-act-order-asymmetric": Gptq(
        gptq(desc_act=True, sym=False), symmetric=False, act_order=True
    ),
    "gptq-one-group": Gptq(gptq(group_size=-1), group=0),
    "awq": Awq({"quant_method": "awq", "bits": 4, "group_size": 128}),
    "int4": Packed(compressed("pack-quantized", **CT_INT4)),
    "int4-asymmetric": Packed(
        compressed("pack-quantized", **CT_INT4, symmetric=False), symmetric=False
    ),
    "int8": Packed(compressed("pack-quantized", **CT_INT4 | {"num_bits": 8}), bits=8),
}
# ranks, strategy, sizes: dummy groups; KV heads copied, their query heads dealt out
WAYS = {"append": (3, {"q_heads": 24, "kv_heads": 3}), "in-group": (6, {"q_heads": 18})}
both_ways = pytest.mark.parametrize("way", WAYS)


def sizes_of(name, config=SMALL):
    axes = {"q_heads": 16 * 128, "kv_heads": 2 * 128, "intermediate": config["intermediate_size"]}
    return tuple(axes[axis] if axis else 128 for axis in MODULES[name])


def checkpoint(case, config=SMALL):
    g = torch.Generator().manual_seed(7)
    weights = {name: torch.randn(shape, generator=g).bfloat16() for name, shape in PLAIN.items()}
    for name in MODULES:
        tensors = case.make(*sizes_of(name, config), g)
        weights |= {f"{LAYER}{name}.{suffix}": tensor for suffix, tensor in tensors.items()}
    return weights


def tensors_of(weights, module):
    prefix = f"{LAYER}{module}."
    return {n.removeprefix(prefix): t for n, t in weights.items() if n.startswith(prefix)}


def expected(planned, module, dense):
    """The dense weight, its rows and columns where the plan's sources say, zeros elsewhere."""
    for dim, axis in enumerate(MODULES[module]):
        if axis is None:
            continue
        unit = 128 if "heads" in axis else 1
        sources = [
            -1 if source is None else source * unit + at
            for source in planned.spreads[axis].sources
            for at in range(unit)
        ]
        zero = dense.new_zeros([1 if d == dim else size for d, size in enumerate(dense.shape)])
        dense = torch.cat((dense, zero), dim).index_select(
            dim, torch.tensor(sources) % (dense.shape[dim] + 1)
        )
    return dense


def padded(case, way="append", config=SMALL, **options):
    tp, sizes = WAYS[way]
    config = config | {"quantization_config": case.config}
    planned = plan(config, tp=tp, strategy=way)
    assert planned.padded_sizes.items() >= sizes.items()
    stock = checkpoint(case, config)
    poisoned = torch.utils.deterministic
    assert poisoned.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)  # new tensors are filled with NaN or the largest code
    try:
        return planned, stock, dict(padded_weights(stock.items(), planned, **options))
    finally:
        torch.use_deterministic_algorithms(False)


@both_ways
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_weight_is_the_padded_weight(case, way):
    planned, stock, made = padded(case, way)
    for module in MODULES:
        got = case.read(tensors_of(made, module))
        want = expected(planned, module, case.read(tensors_of(stock, module)))
        assert torch.equal(got, want), f"{module}: {got.shape} {(got - want).abs().max()}"


@both_ways
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_scales_are_finite_normal_and_raise_no_row(case, way):
    _, stock, made = padded(case, way)
    for name, tensor in made.items():
        if "scale" not in name or tensor.dim() < 2:
            continue
        if tensor.dtype == torch.uint8:
            assert ((tensor > 0) & (tensor < 255)).all(), name
        else:
            values = tensor.double()
            least = torch.finfo(tensor.dtype).smallest_normal
            assert (values.isfinite() & (values >= least)).all(), name
        assert tensor.double().max() == stock[name].double().max(), name


@pytest.mark.parametrize("case", ["fp8-blocks", "gptq"])
def test_a_last_block_that_is_short_takes_zeros(case):
    """600 columns: the fifth block of 128 holds 88 trained ones; its scale serves the zeros."""
    case, config = CASES[case], SMALL | {"intermediate_size": 600}
    planned, stock, made = padded(case, config=config)
    for module in ("mlp.gate_proj", "mlp.down_proj"):
        want = expected(planned, module, case.read(tensors_of(stock, module)))
        assert torch.equal(case.read(tensors_of(made, module)), want)


@pytest.mark.parametrize("case", ["gptq-asymmetric"])
def test_zero_points_that_differ_have_no_zero_for_a_short_group(case):
    with pytest.raises(
        ValueError, match=r"down_proj.qweight: 600 columns end inside a group of 128"
    ):
        padded(CASES[case], config=SMALL | {"intermediate_size": 600})


@pytest.mark.parametrize("case", ["awq", "int4-asymmetric"])
def test_no_format_with_zero_points_ends_inside_a_group(case):
    """AWQ [K, N / 8] and packed [N, K / 8]: the shapes alone tell."""
    config = SMALL | {"intermediate_size": 600, "quantization_config": CASES[case].config}
    catalogue, at = Catalogue(plan(config, tp=3)), f"{LAYER}mlp.down_proj."
    name, shape = ("qweight", (600, 16)) if case == "awq" else ("weight_packed", (128, 75))
    with pytest.raises(ValueError, match=r"600 columns end inside a group of 128, .*; quantise it"):
        catalogue.entry(at + name, shape, "I32")


@pytest.mark.parametrize("copies", [False, True])
def test_a_cache_scale_per_head_follows_its_head(copies):
    """A copied KV head is read with its own scale; a dummy head's is 1."""
    planned = plan(SMALL, tp=6, strategy="in-group" if copies else "append")
    stock = torch.tensor([0.5, 0.25])
    for name in ("self_attn.k_scale", "self_attn.v_proj.v_scale"):
        for shape in ((2,), (2, 1), (2, 1, 1)):
            entry = Catalogue(planned).entry(LAYER + name, shape, "F32")
            wide = pad_tensor(entry, stock.reshape(shape)).flatten().tolist()
            assert wide == ([0.5] * 3 + [0.25] * 3 if copies else [0.5, 0.25, 1.0])


def test_the_scales_of_blocks_keep_their_four_dimensions():
    _, stock, made = padded(CASES["fp8-blocks-modelopt"])
    name = f"{LAYER}mlp.gate_proj.weight_scale"
    assert (stock[name].shape, made[name].shape) == ((5, 1, 1, 1), (6, 1, 1, 1))


def test_single_scales_are_never_stretched():
    _, stock, made = padded(CASES["nvfp4"])
    for name in stock:
        if name.endswith(("weight_scale_2", "input_scale")):
            assert made[name] is stock[name]


@pytest.mark.parametrize(("fill", "code"), [("one", 127), ("zero", 0), ("2^-127", 0)])
def test_a_kernel_may_name_the_fill_of_mxfp4_scales(fill, code):
    _, stock, made = padded(CASES["mxfp4"], scale_fill=fill)
    name = f"{LAYER}mlp.down_proj.weight_scale"
    before = stock[name].shape[1]
    assert torch.equal(made[name][:, :before], stock[name])
    assert (made[name][:, before:] == code).all()


@pytest.mark.parametrize(("fill", "value"), [("one", 1.0), ("zero", 0.0)])
def test_a_kernel_may_name_the_fill_of_nvfp4_scales(fill, value):
    _, stock, made = padded(CASES["nvfp4"], scale_fill=fill)
    name = f"{LAYER}mlp.gate_proj.weight_scale"
    assert (made[name][stock[name].shape[0] :].float() == value).all()


def test_a_fill_that_a_dtype_has_not_is_refused():
    with pytest.raises(ValueError, match=r"2\^-127 is for e8m0 scales, got torch.float8_e4m3fn"):
        padded(CASES["nvfp4"], scale_fill="2^-127")
    with pytest.raises(ValueError, match="scale_fill must be one of nearest, one, zero"):
        padded(CASES["nvfp4"], scale_fill="max")


@pytest.mark.parametrize("bad", [0.0, 2.0**-8 / 2, float("nan")])
def test_the_nearest_scale_is_passed_over_where_it_is_not_normal(bad):
    """Never-written denormal scales sent 86 layers of a published model down a slow path."""
    from tp3.pad import scales
    from tp3.pad.spread import appended, kept

    stock = torch.tensor([[3.0, 2.0, bad], [bad, bad, bad]]).to(torch.float8_e4m3fn)
    wide = scales.pad(stock, (kept(2), appended(3, 4)), "nearest").float()
    assert wide[:, 3].tolist() == [2.0, 2.0]


@pytest.mark.parametrize("case", ["fp8-blocks", "mxfp4", "gptq", "int4", "awq"])
def test_control_a_wrong_fill_is_noticed(case):
    """Codes of zeros are bits of zero for some formats and not for others."""
    case = CASES[case]
    planned, stock, made = padded(case)
    module = "mlp.down_proj"
    tensors = tensors_of(made, module)
    name = next(iter(tensors))
    raw = tensors[name].view(torch.uint8)
    raw[raw == (0x88 if isinstance(case, Gptq | Packed) else 0)] = 0x11
    want = expected(planned, module, case.read(tensors_of(stock, module)))
    assert not torch.equal(case.read(tensors), want)


@pytest.mark.parametrize("case", ["fp8-blocks", "mxfp4", "gptq", "int4"])
def test_control_scales_of_the_wrong_map_are_noticed(case):
    """Query heads dealt out, their scales appended."""
    case = CASES[case]
    planned, stock, made = padded(case, "in-group")
    tensors = tensors_of(made, "self_attn.q_proj")
    key = next(name for name in tensors if "scale" in name)
    before = stock[f"{LAYER}self_attn.q_proj.{key}"]
    wrong = tensors[key].clone()
    wrong[tuple(slice(size) for size in before.shape)] = before
    want = expected(planned, "self_attn.q_proj", case.read(tensors_of(stock, "self_attn.q_proj")))
    assert not torch.equal(case.read(tensors | {key: wrong}), want)


@pytest.mark.parametrize(
    ("case", "lost"),
    [("fp8-blocks", "weight_scale_inv"), ("nvfp4", "weight_scale"), ("gptq", "scales"),
     ("nvfp4", "weight_scale_2"), ("int4", "weight_scale"), ("mxfp4", "weight_scale")],
)  # fmt: skip
def test_a_weight_without_its_scales_is_refused(case, lost):
    config = SMALL | {"quantization_config": CASES[case].config}
    weights = checkpoint(CASES[case], config)
    del weights[f"{LAYER}mlp.up_proj.{lost}"]
    with pytest.raises(ValueError, match=rf"up_proj\.{lost} is missing"):
        list(padded_weights(weights.items(), plan(config, tp=3)))


@pytest.mark.parametrize(
    ("suffix", "shape"),
    [("weight", (639, 128)), ("weight_scale_inv", (5, 2)), ("weight_scale_inv", (640,))],
)
def test_a_companion_of_another_shape_is_refused(suffix, shape):
    config = SMALL | {"quantization_config": CASES["fp8-blocks"].config}
    weights = checkpoint(CASES["fp8-blocks"], config)
    name = f"{LAYER}mlp.up_proj.{suffix}"
    weights[name] = torch.ones(shape).to(weights[name].dtype)
    with pytest.raises(ValueError, match=rf"up_proj.{suffix} has shape .*, expected \["):
        list(padded_weights(weights.items(), plan(config, tp=3)))


def test_an_ignored_module_is_plain_and_counted():
    form = CASES["fp8-blocks"]
    config = SMALL | {
        "quantization_config": form.config | {"modules_to_not_convert": [LAYER + "mlp"]}
    }
    weights = checkpoint(form, config)
    for module in ("gate_proj", "up_proj", "down_proj"):
        name = f"{LAYER}mlp.{module}.weight"
        weights[name] = weights[name].bfloat16()
        del weights[name + "_scale_inv"]
    planned = plan(config, tp=3)
    assert planned.padded_sizes["intermediate"] == 672  # and not 768, whole blocks of 128
    made = dict(padded_weights(weights.items(), planned))
    assert made[f"{LAYER}mlp.up_proj.weight"].shape == (672, 128)


GPT_OSS = {
    "model_type": "gpt_oss",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "vocab_size": 100,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
    },
}


def read_stacked(blocks, scales):
    """[E, N, K / 32, 16] pairs of e2m1 and [E, N, K / 32] e8m0, as [E, N, K]."""
    codes = E2M1[nibbles(blocks).long()]
    return (codes * torch.pow(2.0, scales.double() - 127)[..., None]).flatten(-2)


def test_stacked_experts_in_blocks():
    """gate_up interleaves, down is square: which dimension grows is told by the rule alone."""
    catalogue = Catalogue(plan(GPT_OSS, tp=3))
    g, at = torch.Generator().manual_seed(3), "model.layers.0.mlp.experts."
    for name, rows, want in [("gate_up_proj", 128, (2, 192, 64)), ("down_proj", 64, (2, 64, 96))]:
        stock = {
            "_blocks": torch.randint(0, 256, (2, rows, 2, 16), generator=g, dtype=torch.uint8),
            "_scales": torch.randint(120, 130, (2, rows, 2), generator=g, dtype=torch.uint8),
        }
        made = {
            end: pad_tensor(catalogue.entry(at + name + end, tuple(t.shape), "U8"), t)
            for end, t in stock.items()
        }
        got = read_stacked(made["_blocks"], made["_scales"])
        dense = read_stacked(stock["_blocks"], stock["_scales"])
        assert got.shape == want
        assert torch.equal(got[tuple(slice(size) for size in dense.shape)], dense)
        assert got.count_nonzero() == dense.count_nonzero()


def test_stacked_experts_want_their_scales_and_keep_single_ones():
    catalogue, at = Catalogue(plan(GPT_OSS, tp=3)), "model.layers.0.mlp.experts.down_proj"
    catalogue.entry(at + "_blocks", (2, 64, 2, 16), "U8")
    missing = catalogue.missing([at + "_blocks"])
    assert missing[-1] == at + "_scales"
    assert at not in missing
    assert at + "_scales" not in catalogue.missing([at + "_blocks", at + "_scales"])
    for shape in ((), (1,), (2,), (2, 1)):
        assert catalogue.entry(at + "_input_scale", shape, "F32").inert
    with pytest.raises(ValueError, match=r"input_scale has shape \[3\], expected \[\] or \[2\]"):
        catalogue.entry(at + "_input_scale", (3,), "F32")


def test_lists_of_ignored_modules_need_not_be_exact():
    """bf16 where fp8 is said, fp8 where bf16 is: the file's own shape and dtype decide."""
    form = CASES["fp8-blocks"].config
    loose = SMALL | {"quantization_config": form | {"modules_to_not_convert": ["up_proj"]}}
    catalogue, at = Catalogue(plan(loose, tp=3)), LAYER + "mlp."
    assert catalogue.entry(at + "gate_proj.weight", (640, 128), "BF16").padded == (768, 128)
    assert catalogue.entry(at + "up_proj.weight", (640, 128), "F8_E4M3").padded == (768, 128)
    assert catalogue.entry(at + "up_proj.weight_scale_inv", (5, 1), "F32").padded == (6, 1)
