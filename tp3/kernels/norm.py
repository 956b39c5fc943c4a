"""Residual add, RMSNorm and FP8 of rows (``normed`` has the formulas): one device function, which
the fused kernel calls on sums and the plain one on what has been summed.

Both give the same bits: a row is in one block, cut among its threads alike (``warps_of``), so that
its squares are added in one order. Everything else rounds as IEEE says, on every target. The
AMD code was compiled and read, never run.
"""

from __future__ import annotations

import struct

import triton
import triton.language as tl
from torch import Tensor

from tp3.kernels import normed
from tp3.kernels.arithmetic import narrowed, widened
from tp3.kernels.normed import Norm, Normed
from tp3.kernels.operands import check as check_operand
from tp3.kernels.operands import multiplies_e4m3, same_device, start, target_of
from tp3.kernels.primitives import vectors_at

GROUP = tl.constexpr(normed.GROUP)
LARGEST_E4M3 = tl.constexpr(normed.LARGEST_E4M3)
SMALLEST_SCALE = tl.constexpr(normed.SMALLEST_SCALE)
INFINITY_BITS = tl.constexpr(0x7F800000)
LARGEST_E4M3_BITS = tl.constexpr(0x43E00000)
LEAST_NORMAL_E4M3_BITS = tl.constexpr(0x3C800000)  # 2**-6
# Added to less than 2**-6, a multiple of 2**-9 is left in the last bits.
SUBNORMAL_SHIFT = tl.constexpr(2.0**14)
VALUES_PER_THREAD = tl.constexpr(8)  # 16 bytes of bf16
# Of a block, and threads of one.
_WARPS, _AMD_WARPS = 32, 16
_LANES = {"gfx9": 64}


def padded_width(width: int) -> int:
    """A power of two that holds a row and a whole group."""
    return max(normed.GROUP, triton.next_power_of_2(width))


def warps_of(width: int, target: str) -> int:
    """Of a block that has a row of ``width`` values."""
    most = _AMD_WARPS if target.startswith("gfx") else _WARPS
    each = _LANES.get(target, 32) * VALUES_PER_THREAD.value
    return max(1, min(padded_width(width) // each, most))


def bits_of(eps: float) -> int:
    """The fp32 as an integer: kernels take no other arguments."""
    return int(struct.unpack("<i", struct.pack("<f", eps))[0])


def constants_of(width: int, norm: Norm, target: str, *, native: bool) -> dict[str, object]:
    """Constants that the fused and the plain kernel share. native: the GPU rounds to e4m3."""
    return {
        "K": width,
        "ROW": padded_width(width),
        "PLUS_ONE": norm.plus_one,
        "QUANT": norm.quant or "",
        "NATIVE": native,
        "TARGET": target,
    }


@triton.jit
def e4m3_codes(x, NATIVE: tl.constexpr):
    """fp32 to the nearest e4m3, ties to even, 448 at most, as uint8; any NaN is 0x7F."""
    if NATIVE:
        codes = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = x.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        capped = tl.minimum(size, LARGEST_E4M3_BITS)
        normal = ((capped + 0x7FFFF + ((capped >> 20) & 1)) >> 20) - (127 - 7) * 8
        shifted = capped.to(tl.float32, bitcast=True) + SUBNORMAL_SHIFT
        small = shifted.to(tl.int32, bitcast=True) & 0xF
        code = tl.where(capped < LEAST_NORMAL_E4M3_BITS, small, normal)
        code = tl.where(size > INFINITY_BITS, 0x7F, code | ((bits >> 24) & 0x80))
        codes = code.to(tl.uint8)
    return codes


@triton.jit
def scale_of(largest):
    """Bits of the largest magnitude to the scale. Compared as integers, a NaN is the largest."""
    scale = largest.to(tl.float32, bitcast=True)
    scale = tl.div_rn(scale, tl.full(scale.shape, LARGEST_E4M3, tl.float32))
    return tl.where(scale < SMALLEST_SCALE, SMALLEST_SCALE, scale)


@triton.jit
def row_of(address, row, K: tl.constexpr, ROW: tl.constexpr):
    """[ROW] of row ``row`` of [M, K] bf16, zeros beyond K."""
    cols = tl.arange(0, ROW)
    return tl.load(vectors_at(address, tl.bfloat16) + row * K + cols, cols < K, other=0)


@triton.jit
def finish_row(
    total, residual, gain, row, out, residual_out, scale, eps_bits, K: tl.constexpr,
    ROW: tl.constexpr, PLUS_ONE: tl.constexpr, QUANT: tl.constexpr, NATIVE: tl.constexpr,
    TARGET: tl.constexpr,
):  # fmt: skip
    """All after the sum of a row, in the order of ``normed``.

    total: [ROW] fp32; residual, gain: [ROW] bf16; zeros beyond K (or a total of NaN). row: int64.
    out, residual_out, scale: addresses, written.
    """
    cols = tl.arange(0, ROW)
    inside = cols < K
    place = row * K + cols
    y = widened(narrowed(total, "SUM", 1, tl.bfloat16, TARGET), tl.bfloat16)
    v = y + widened(residual, tl.bfloat16)
    kept = narrowed(v, "SUM", 1, tl.bfloat16, TARGET)
    tl.store(vectors_at(residual_out, tl.bfloat16) + place, kept, inside)
    eps = tl.full([1], eps_bits, tl.int64).to(tl.int32).to(tl.float32, bitcast=True)
    square = tl.div_rn(tl.full([1], 0, tl.float32) + tl.sum(v * v), tl.full([1], K, tl.float32))
    root = tl.div_rn(tl.full([1], 1, tl.float32), tl.sqrt_rn(square + eps))
    factor = widened(gain, tl.bfloat16)
    if PLUS_ONE:
        factor = 1 + factor
    n = narrowed(v * root * factor, "SUM", 1, tl.bfloat16, TARGET)
    if QUANT == "":
        tl.store(vectors_at(out, tl.bfloat16) + place, n, inside)
    else:
        wide = widened(n, tl.bfloat16)
        size = wide.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        if QUANT == "token":
            each = scale_of(tl.full([1], 0, tl.int32) + tl.max(size))
            tl.store((scale + row * 4).to(tl.pointer_type(tl.float32)) + tl.arange(0, 1), each)
            divisor = tl.broadcast_to(each, [ROW])
        else:
            tl.static_assert(QUANT == "group")
            each = scale_of(tl.max(tl.reshape(size, [ROW // GROUP, GROUP]), 1))
            groups = tl.arange(0, ROW // GROUP)
            NUM: tl.constexpr = (K + GROUP - 1) // GROUP
            scales = (scale + row * (4 * NUM)).to(tl.pointer_type(tl.float32))
            tl.store(scales + groups, each, groups < NUM)
            divisor = tl.reshape(tl.broadcast_to(each[:, None], [ROW // GROUP, GROUP]), [ROW])
        codes = e4m3_codes(tl.div_rn(wide, divisor), NATIVE)
        # Said to be aligned to no more than 8: a thread then keeps the values that it has.
        bytes_at = tl.multiple_of(out.to(tl.pointer_type(tl.uint8)), VALUES_PER_THREAD)
        tl.store(bytes_at + place, codes, inside)


@triton.jit(
    do_not_specialize=["y", "residual", "weight", "out", "residual_out", "scale", "eps_bits"]
)
def add_rms_norm_kernel(
    y: tl.int64,  # address of [M, K] bf16
    residual: tl.int64,  # address of [M, K] bf16
    weight: tl.int64,  # address of [K] bf16
    out: tl.int64,  # address of [M, K] bf16 or uint8, written
    residual_out: tl.int64,  # address of [M, K] bf16, written
    scale: tl.int64,  # address of [M] or [M, G] fp32, written; 0 without QUANT
    eps_bits: tl.int64,
    K: tl.constexpr,
    ROW: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    QUANT: tl.constexpr,
    NATIVE: tl.constexpr,
    TARGET: tl.constexpr,
):
    """>>> y [1, 1], residual [2, 2], w [1, 2], eps 0: out [1, 2], residual_out [3, 3]"""
    row = tl.program_id(0).to(tl.int64)
    finish_row(
        widened(row_of(y, row, K, ROW), tl.bfloat16), row_of(residual, row, K, ROW),
        row_of(weight, row * 0, K, ROW), row, out, residual_out, scale, eps_bits, K, ROW, PLUS_ONE,
        QUANT, NATIVE, TARGET,
    )  # fmt: skip


def add_rms_norm(
    y: Tensor, residual: Tensor, weight: Tensor, norm: Norm, to: Normed | None = None
) -> Normed:
    """The separate steps on y [M, K] bf16, residual [M, K], weight [K], into ``to`` if given.
    Errors: ValueError.
    """
    normed.check(y, residual, weight)
    check_operand("y", y, [y.dtype], [None, None])
    same_device(y=y, residual=residual, weight=weight)
    result = normed.empty(y, norm) if to is None else to
    rows, width = y.shape
    if rows:
        target = target_of(y.device)
        tensors = [normed.dense(tensor) for tensor in (y, residual, weight)]
        start(
            add_rms_norm_kernel, warps_of(width, target), y.device, (rows, 1),
            [*tensors, *result, bits_of(norm.eps)],
            **constants_of(width, norm, target, native=multiplies_e4m3(y.device)),
        )  # fmt: skip
    return result
