"""The tensors that stand in a file for one quantised weight. No torch.

A row says: *beside the module there is a tensor of this name, its dimensions are those of the
weight divided so, and this stands where nothing was trained.* Symbols: the weight is [N, K]; r and
c share a scale (``Format.rows``, ``.columns``); p integers are packed in a word of 32 bits.
Dimensions of stacked experts come first and are not written.
"""

from __future__ import annotations

from dataclasses import dataclass

from tp3.pad.formats import Format

SCALE_FILLS = ("nearest", "one", "zero", "2^-127")


@dataclass(frozen=True)
class Companion:
    """fill: bits of zero, or by name: ``scale`` (as the caller chose), ``middle`` (each packed
    integer is the code of 0), ``zero point``, ``group`` (which group a column is of), ``shape``.
    """

    suffix: str
    dims: tuple[str, ...]
    fill: float | str = 0.0


# The weight's own entry comes first; of the others any that is there must fit.
LAYOUTS: dict[str, tuple[Companion, ...]] = {
    "plain": (),
    "fp8": (
        Companion("weight", ("N", "K")),
        Companion("weight_scale_inv", ("N/r", "K/c"), "scale"),
        Companion("weight_scale", ("N/r", "K/c"), "scale"),
        Companion("scale", ("N/r", "K/c"), "scale"),
    ),
    "mxfp4": (
        Companion("weight", ("N", "K/2")),
        Companion("weight_packed", ("N", "K/2")),
        Companion("blocks", ("N", "K/32", "16")),
        Companion("weight_scale", ("N", "K/c"), "scale"),
        Companion("weight_scale_inv", ("N", "K/c"), "scale"),
        Companion("scales", ("N", "K/c"), "scale"),
        Companion("scale", ("N", "K/c"), "scale"),
    ),
    "nvfp4": (
        Companion("weight", ("N", "K/2")),
        Companion("weight_packed", ("N", "K/2")),
        Companion("weight_scale", ("N", "K/c"), "scale"),
    ),
    "gptq": (
        Companion("qweight", ("K/p", "N"), "middle"),
        Companion("qzeros", ("K/c", "N/p"), "zero point"),
        Companion("scales", ("K/c", "N"), "scale"),
        Companion("g_idx", ("K",), "group"),
    ),
    "awq": (
        Companion("qweight", ("K", "N/p")),
        Companion("qzeros", ("K/c", "N/p")),
        Companion("scales", ("K/c", "N"), "scale"),
    ),
    "packed": (
        Companion("weight_packed", ("N", "K/p"), "middle"),
        Companion("weight_scale", ("N", "K/c"), "scale"),
        Companion("weight_zero_point", ("N/p", "K/c"), "middle"),
        Companion("weight_shape", ("2",), "shape"),
        Companion("weight_g_idx", ("K",), "group"),
    ),
}
LAYOUTS["int8"] = LAYOUTS["mxfp8"] = LAYOUTS["fp8"]
# One number for a tensor, or for each stacked expert: never stretched.
SINGLE = (
    "weight_scale_2",
    "weight_global_scale",
    "input_scale",
    "input_scale_inv",
    "input_global_scale",
    "output_scale",
    "activation_scale",
)
# One number for a module's cache, or for each KV head: 1 where there is no trained head.
CACHE = ("k_scale", "v_scale", "q_scale", "prob_scale", "kv_scale")
# What must come with the entry of a weight; of several one.
NEEDED = {
    "fp8": (("weight_scale_inv", "weight_scale", "scale"),),
    "int8": (("weight_scale",),),
    "mxfp8": (("weight_scale", "weight_scale_inv", "scale"),),
    "mxfp4": (("weight_scale", "scales", "weight_scale_inv", "scale"),),
    "nvfp4": (("weight_scale",), ("weight_scale_2", "weight_global_scale")),
    "gptq": (("qzeros",), ("scales",)),
    "awq": (("qzeros",), ("scales",)),
    "packed": (("weight_scale",), ("weight_shape",)),
}
PRIMARY = frozenset(("weight", "weight_packed", "blocks", "qweight"))
SUFFIXES = (
    *dict.fromkeys(row.suffix for rows in LAYOUTS.values() for row in rows),
    *SINGLE,
)


def row_of(form: Format, suffix: str) -> Companion | None:
    """A format's tensor of this name."""
    return next((row for row in LAYOUTS[form.name] if row.suffix == suffix), None)


def word(form: Format, fill: str) -> float:
    """A word of 32 bits in which every integer is the code of 0, or the zero point stored for it;
    as a signed integer, which is how files hold it.
    """
    code = (1 << (form.code - 1)) - (form.zero_offset if fill == "zero point" else 0)
    bits = sum(code << shift for shift in range(0, 32, form.code))
    return float(bits - (1 << 32) if bits >> 31 else bits)
