"""From ``quantization_config`` to a ``Format``: one function per ``quant_method``. No torch.

Sources: the configs that Transformers, AutoGPTQ, AutoAWQ, compressed-tensors and ModelOpt write.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from tp3.pad.formats import PLAIN, Format

Values = Mapping[str, Any]

REFUSED = {
    "bitsandbytes": "its blocks run over the flattened weight and straddle any padded row",
    "gguf": "its blocks hold scales and codes together; convert it to safetensors",
    "exl2": "its columns are permuted and of several widths",
    "exl3": "its Hadamard transform mixes 128 entries, so that a zero does not stay one",
    "hqq": "its groups run over the flattened weight",
    "aqlm": "its codebooks have no code for zero",
    "quip": "its transform mixes entries, so that a zero does not stay one",
    "torchao": "its tensors are pickled subclasses",
}
FP8 = Format("fp8", 0, 0, 8)
CHANNEL = Format("fp8", 1, 0, 8)
MXFP8 = Format("mxfp8", 1, 32, 8.25)
MXFP4 = Format("mxfp4", 1, 32, 4.25)
NVFP4 = Format("nvfp4", 1, 16, 4.5)
ALGORITHMS = {
    "FP8": FP8,
    "FP8_PER_CHANNEL_PER_TOKEN": CHANNEL,
    "FP8_PB_WO": Format("fp8", 128, 128, 8),
    "MXFP8": MXFP8,
    "NVFP4": NVFP4,
    "NVFP4_AWQ": NVFP4,
    "W4A16_NVFP4": NVFP4,
    "W4A16_MXFP4": MXFP4,
    "W4A8_MXFP4_FP8": MXFP4,
}


def understood(config: Values, hf_quant_config: Values | None = None) -> Format | None:
    """None without a quantisation. A nested ``text_config`` may hold it."""
    inner = config.get("text_config") or {}
    values = config.get("quantization_config") or inner.get("quantization_config")
    if not values and hf_quant_config:
        values = hf_quant_config.get("quantization", hf_quant_config)
    if not values:
        return None
    method = values.get("quant_method") or ("modelopt" if "quant_algo" in values else None)
    if method in REFUSED:
        raise ValueError(f"quant_method {method} cannot be padded: {REFUSED[method]}")
    if method not in METHODS:
        raise ValueError(
            f"quant_method must be one of {', '.join(METHODS)} to be padded, got {method!r}"
        )
    ignored = [
        name
        for key in ("ignore", "exclude_modules", "modules_to_not_convert")
        if not (key == "ignore" and method == "fp8")  # ModelOpt's, of the parts alone
        for name in values.get(key) or ()
    ]
    wrong = next((name for name in ignored if not isinstance(name, str)), None)
    if wrong is not None:
        raise ValueError(f"quantization_config is malformed: a module to ignore is {wrong!r}")
    form = METHODS[method](values)
    if config.get("expert_dtype", inner.get("expert_dtype")) == "fp4" and not form.parts:
        form = replace(form, parts=(replace(MXFP4, targets=("experts",)),))
    return replace(form, ignored=tuple(ignored))


def _fp8(values: Values) -> Format:
    block = values.get("weight_block_size")
    form = replace(FP8, rows=block[0], columns=block[1]) if block else FP8
    return replace(form, parts=_layers(values))


def _modelopt(values: Values) -> Format:
    algorithm = values.get("quant_algo")
    if algorithm == "MIXED_PRECISION":
        return replace(PLAIN, parts=_layers(values))
    return _algorithm(algorithm)


def _layers(values: Values) -> tuple[Format, ...]:
    """ModelOpt's ``quantized_layers``: an algorithm for each module."""
    modules: dict[str, list[str]] = {}
    for module, choice in (values.get("quantized_layers") or {}).items():
        modules.setdefault(choice.get("quant_algo"), []).append(module)
    return tuple(replace(_algorithm(name), targets=tuple(at)) for name, at in modules.items())


def _algorithm(name: Any) -> Format:
    if name not in ALGORITHMS:
        raise ValueError(f"quant_algo must be one of {', '.join(ALGORITHMS)}, got {name!r}")
    return ALGORITHMS[name]


def _compressed(values: Values) -> Format:
    groups = list((values.get("config_groups") or {}).values())
    if not groups:
        raise ValueError("quantization_config.config_groups is missing")
    if (values.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise ValueError("sparsity_config: a sparse checkpoint cannot be padded")
    outer = values.get("format", "")
    forms = [_group(group["weights"], group.get("format") or outer) for group in groups]
    if len(forms) == 1:
        targets = tuple(groups[0].get("targets") or ())
        return replace(forms[0], targets=() if "Linear" in targets else targets)
    return replace(
        PLAIN,
        parts=tuple(
            replace(form, targets=tuple("*" if t == "Linear" else t for t in group["targets"]))
            for form, group in zip(forms, groups, strict=True)
        ),
    )


def _group(weights: Values, layout: str) -> Format:
    bits, kind = weights.get("num_bits"), weights.get("type")
    size, strategy = weights.get("group_size") or 0, weights.get("strategy")
    strategy = strategy or ("group" if size > 0 else "tensor")
    if kind == "float" and bits == 4 and size in (16, 32):
        return NVFP4 if size == 16 else MXFP4
    if kind == "float" and bits == 8:
        if strategy == "block":
            rows, columns = weights.get("block_structure") or (128, 128)
            return replace(FP8, rows=rows, columns=columns)
        if strategy == "group" and size == 32:
            return MXFP8
        if strategy in ("tensor", "channel"):
            return FP8 if strategy == "tensor" else CHANNEL
    if kind == "int" and bits == 8 and layout != "pack-quantized":
        return replace(CHANNEL, name="int8", rows=0 if strategy == "tensor" else 1)
    if kind == "int" and bits in (4, 8) and layout == "pack-quantized":
        return Format(
            "packed",
            1,
            max(size, 0),
            _with_scales(bits, size),
            code=bits,
            symmetric=bool(weights.get("symmetric", True)),
            act_order=weights.get("actorder") in ("group", True),
        )
    raise ValueError(f"{layout or 'a'} group of {bits}-bit {kind} {strategy} {size} is not padded")


def _gptq(values: Values) -> Format:
    if values.get("dynamic"):
        raise ValueError("GPTQ's dynamic: modules of different bits cannot be padded")
    v2 = values.get("checkpoint_format") == "gptq_v2"
    return _integers("gptq", values, (2, 4, 8), "sym", "desc_act", zero_offset=0 if v2 else 1)


def _awq(values: Values) -> Format:
    if values.get("version", "gemm").lower() != "gemm":
        raise ValueError(f"AWQ's version must be gemm to be padded, got {values['version']!r}")
    return replace(_integers("awq", values, (4,), "", ""), symmetric=False)


def _integers(
    name: str, values: Values, allowed: tuple[int, ...], sym: str, act: str, zero_offset: int = 0
) -> Format:
    bits, size = values.get("bits", values.get("w_bit")), values.get("group_size", 128)
    if bits not in allowed or not isinstance(size, int):
        raise ValueError(
            f"{name} must have {' or '.join(map(str, allowed))} bits in groups to be padded, "
            f"got {bits!r} and {size!r}"
        )
    return Format(
        name,
        1,
        max(size, 0),
        _with_scales(bits, size),
        code=bits,
        symmetric=bool(values.get(sym, True)),
        act_order=bool(values.get(act, False)),
        zero_offset=zero_offset,
    )


def _with_scales(bits: int, size: int) -> float:
    return bits + (16 + bits) / size if size > 0 else bits


METHODS: dict[str, Callable[[Values], Format]] = {
    "fp8": _fp8,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "mxfp4": lambda values: MXFP4,
    "compressed-tensors": _compressed,
    "gptq": _gptq,
    "awq": _awq,
}
