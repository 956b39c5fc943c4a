"""What a sum must be, in numpy: every op, widened, in rank order, rounded once; and data that show
another order or a rounding in between (``tests.ranks.test_exact`` proves that they do).
"""

import functools
import operator

import numpy as np
import torch

from tests.ranks.reference import FLOATS, same
from tests.ranks.test_exact import TRIPLES, rounded, wide

POISON = 0xA5
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
COMBINE = {
    "SUM": operator.add,
    "AVG": operator.add,
    "PRODUCT": operator.mul,
    "MIN": np.minimum,
    "MAX": np.maximum,
    "BAND": operator.and_,
    "BOR": operator.or_,
    "BXOR": operator.xor,
}


def ops_of(dtype):
    """What ``tp3.comm.reduce`` allows and the kernels compute."""
    return [op for op in COMBINE if dtype not in FLOATS or op[0] != "B"]


def inputs(dtype, op, world_size, numel, salt=0):
    """What each rank holds: values of dtype, floats in their wide type.

    SUM and AVG: every other element cancels; MIN and MAX: some are NaN; integers wrap around.
    """
    rng = np.random.default_rng([world_size, numel, salt])
    if dtype not in FLOATS:
        kind = np.dtype(str(dtype)[6:])
        limits = np.iinfo(kind)
        return list(rng.integers(limits.min, limits.max, (world_size, numel), kind, endpoint=True))
    spread = 12 if op in ("SUM", "AVG") else 2
    values = np.ldexp(
        rng.standard_normal((world_size, numel)), rng.integers(-spread, spread + 1, numel)
    )
    if op in ("SUM", "AVG") and world_size > 2:
        high, low = TRIPLES[dtype]
        terms = np.zeros((world_size, numel))
        terms[:3] = np.array([[2.0**high], [-(2.0**high)], [2.0**low]])
        values[:, 1::2] = rng.permuted(terms, axis=0)[:, 1::2]
    if op in ("MIN", "MAX"):
        values[rng.integers(0, world_size, numel // 8), rng.integers(0, numel, numel // 8)] = np.nan
    return list(rounded(values.astype(wide(dtype)), dtype))


def reduced(dtype, op, arrays):
    """``arrays`` combined in the order given."""
    with np.errstate(all="ignore"):
        total = functools.reduce(COMBINE[op], arrays)
        if op == "AVG" and dtype in FLOATS:
            total = total / wide(dtype)(len(arrays))
        elif op == "AVG":
            down = total // len(arrays)
            total = down + ((total < 0) & (total % len(arrays) != 0))  # towards zero
        return rounded(total, dtype) if dtype in FLOATS else total.astype(arrays[0].dtype)


def held(values, dtype):
    """A tensor of dtype with exactly these values; the NaN of bf16 is 0x7FC0."""
    if dtype == torch.bfloat16:
        bits = np.ascontiguousarray(values).view(np.uint32) >> 16
        return torch.from_numpy(bits.astype(np.uint16).view(np.int16)).view(dtype)
    with np.errstate(over="ignore"):
        kind = {torch.float16: np.float16}.get(dtype, values.dtype)
        return torch.from_numpy(values.astype(kind))


class Guarded:
    """``numel`` elements at an address that is a multiple of ``align`` bytes and of no more, in
    poisoned memory that must stay as it is around them.
    """

    def __init__(self, numel, dtype, align=16):
        size = numel * dtype.itemsize
        self.base = torch.full((size + 96,), POISON, dtype=torch.uint8)
        start = -self.base.data_ptr() % 32 + align
        self.inside = slice(start, start + size)
        self.view = self.base[self.inside].view(dtype)

    @classmethod
    def holding(cls, tensor, align=16):
        made = cls(tensor.numel(), tensor.dtype, align)
        made.view.copy_(tensor)
        return made

    def check(self, label, want):
        """The elements are ``want`` bit by bit, the memory around them is untouched."""
        same(label, self.view, want)
        outside = torch.cat((self.base[: self.inside.start], self.base[self.inside.stop :]))
        assert (outside == POISON).all(), f"{label}: wrote outside the output"
