"""The sum inside a kernel: accumulate wide in rank order, round once to nearest even."""

import triton
import triton.language as tl


@triton.jit
def widened(x, DTYPE: tl.constexpr):
    """fp16 and bf16 as fp32; everything else as it is."""
    if DTYPE == tl.bfloat16 or DTYPE == tl.float16:
        y = x.to(tl.float32)
    else:
        y = x
    return y


@triton.jit
def folded(total, x, OP: tl.constexpr):
    """``total`` and the next rank's ``x``, both wide."""
    if OP == "SUM" or OP == "AVG":
        total = total + x
    elif OP == "PRODUCT":
        total = total * x
    elif OP == "MIN":
        total = tl.minimum(total, x, propagate_nan=tl.PropagateNan.ALL)
    elif OP == "MAX":
        total = tl.maximum(total, x, propagate_nan=tl.PropagateNan.ALL)
    elif OP == "BAND":
        total = total & x
    elif OP == "BOR":
        total = total | x
    else:
        tl.static_assert(OP == "BXOR")
        total = total ^ x
    return total


@triton.jit
def narrowed(
    total, OP: tl.constexpr, WORLD: tl.constexpr, DTYPE: tl.constexpr, TARGET: tl.constexpr
):
    """The result: divided for AVG (truncated for integers), rounded to ``DTYPE``."""
    if OP == "AVG":
        if DTYPE == tl.float64:
            total = total / WORLD
        elif DTYPE.is_floating():
            total = tl.div_rn(total, tl.full(total.shape, WORLD, total.dtype))
        else:
            total = total // WORLD
    if DTYPE == tl.bfloat16 and TARGET == "interpret":
        # The interpreter truncates; add half a unit, and one when that would tie to odd.
        bits = total.to(tl.uint32, bitcast=True)
        even = (bits >> 16) & 1
        bits = tl.where(total == total, bits + 0x7FFF + even, 0x7FC00000)
        y = (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        y = total.to(DTYPE)
    return y


@triton.jit
def all_ones(shape: tl.constexpr, DTYPE: tl.constexpr):
    """What an output holds whose sum failed: all bits set, which is NaN in every float dtype."""
    if DTYPE.primitive_bitwidth == 8:
        bits = tl.full(shape, -1, tl.int8)
    elif DTYPE.primitive_bitwidth == 16:
        bits = tl.full(shape, -1, tl.int16)
    elif DTYPE.primitive_bitwidth == 32:
        bits = tl.full(shape, -1, tl.int32)
    else:
        bits = tl.full(shape, -1, tl.int64)
    return bits.to(DTYPE, bitcast=True)
