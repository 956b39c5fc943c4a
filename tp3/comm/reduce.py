"""The one sum: ``((x0 + x1) + x2) + …`` in rank order, accumulated wide, rounded once.

fp16 and bf16 accumulate in fp32, fp32 and fp64 in themselves, integers wrap around exactly. Every
algorithm calls ``Reduction.combine``, so no result depends on which one ran. Blocks of 32 Ki
elements keep the accumulator in cache.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ReduceOp

from tp3.comm.select import OPS
from tp3.comm.tensors import Array

BLOCK = 32 << 10
_MINE = threading.local()

_UFUNCS: dict[str, np.ufunc] = {
    "SUM": np.add,
    "AVG": np.add,
    "PREMUL_SUM": np.add,
    "PRODUCT": np.multiply,
    "MIN": np.minimum,
    "MAX": np.maximum,
    "BAND": np.bitwise_and,
    "BOR": np.bitwise_or,
    "BXOR": np.bitwise_xor,
}
_TORCH: dict[str, Callable[..., Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PREMUL_SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
}
_NAMES = {getattr(ReduceOp.RedOpType, name): name for name in OPS}
# A sum of truths is "any", a product is "all"; as in NCCL.
_BOOL_OPS = {"SUM": "BOR", "MAX": "BOR", "PRODUCT": "BAND", "MIN": "BAND"}
_BITWISE = ("BAND", "BOR", "BXOR")
_LINEAR = ("SUM", "AVG", "PREMUL_SUM")
_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_SIGNED = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
_COMPLEX = (torch.complex64, torch.complex128)
# What memory is viewed as where numpy lacks the dtype, or has more arithmetic in another.
_STORAGE = {
    torch.bool: torch.uint8,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}

ALLOWED: dict[torch.dtype, tuple[str, ...]] = {
    **dict.fromkeys(_FLOATS, tuple(op for op in OPS if op not in _BITWISE)),
    **dict.fromkeys(_SIGNED, tuple(op for op in OPS if op != "PREMUL_SUM")),
    **dict.fromkeys(_UNSIGNED, tuple(op for op in OPS if op not in ("PREMUL_SUM", "AVG"))),
    **dict.fromkeys(_COMPLEX, _LINEAR),
    torch.bool: tuple(_BOOL_OPS) + _BITWISE,
}


def op_name(op: ReduceOp | ReduceOp.RedOpType) -> str:
    """``SUM``, ``AVG``, … of torch's reduce op; ValueError for one that r4d does not know."""
    kind = getattr(op, "op", op)
    name = _NAMES.get(kind)
    if name is None:
        got = str(kind).rpartition(".")[2]
        raise ValueError(f"reduce op is {got}; r4d allows {', '.join(OPS)}")
    return name


def premul_factor(op: ReduceOp) -> float | Tensor:
    """The factor of a PREMUL_SUM, a number or a tensor of one element."""
    state: Any = op.__getstate__()
    factor: float | Tensor = state[1]
    return factor


@dataclass(frozen=True)
class Reduction:
    """A reduce op on a dtype.

    storage: the dtype that the memory is viewed as to become an array (complex: two per element).
    """

    op: str
    dtype: torch.dtype
    storage: torch.dtype = field(init=False)

    def __post_init__(self) -> None:
        allowed = ALLOWED.get(self.dtype)
        if allowed is None:
            names = ", ".join(str(dtype)[6:] for dtype in ALLOWED)
            raise ValueError(f"r4d cannot reduce {self.dtype}; allowed: {names}")
        if self.op not in allowed:
            raise ValueError(f"r4d has no {self.op} of {self.dtype}; allowed: {', '.join(allowed)}")
        object.__setattr__(self, "storage", _STORAGE.get(self.dtype, self.dtype))

    @property
    def wide(self) -> torch.dtype:
        """What it accumulates in."""
        return _WIDE.get(self.dtype, self.storage)

    def combine(self, parts: Sequence[Array], out: Array) -> None:
        """Write the reduction of ``parts`` (rank order, flat, of dtype ``storage``) to ``out``.

        ``out`` may be one of the parts: each block is read entirely before it is written.
        """
        if len(parts) == 1:
            out[:] = parts[0]
            return
        combine = self._in_numpy if self._has_numpy else self._in_torch
        for start in range(0, out.size, BLOCK):
            place = slice(start, start + BLOCK)
            combine([part[place] for part in parts], out[place])

    @property
    def _has_numpy(self) -> bool:
        """Whether numpy's arithmetic gives the same bits for every alignment, and truncates."""
        if self.dtype in _FLOATS:
            return self.dtype not in _WIDE and self.op not in ("MIN", "MAX")
        return self.op != "AVG" or self.dtype in _COMPLEX

    def _in_numpy(self, parts: Sequence[Array], out: Array) -> None:
        ufunc = _UFUNCS[_BOOL_OPS.get(self.op, self.op) if self.dtype is torch.bool else self.op]
        total = parts[0]
        with np.errstate(all="ignore"):
            if len(parts) > 2:
                acc = _scratch(self.storage).array[: out.size]
                for part in parts[1:-1]:
                    total = ufunc(total, part, out=acc)
            ufunc(total, parts[-1], out=out)
            if self.op == "AVG":
                np.divide(out, len(parts), out=out)

    def _in_torch(self, parts: Sequence[Array], out: Array) -> None:
        binary = _TORCH[self.op]
        terms = [self._tensor(part) for part in parts]
        scratch = _scratch(self.wide)
        acc, term = scratch.acc[: out.size], scratch.term[: out.size]
        acc.copy_(terms[0])
        for source in terms[1:]:
            if source.dtype is not self.wide:
                source = term.copy_(source)
            binary(acc, source, out=acc)
        if self.op == "AVG":
            whole = None if self.wide.is_floating_point else "trunc"
            torch.div(acc, len(parts), rounding_mode=whole, out=acc)
        self._tensor(out).copy_(acc)

    def _tensor(self, array: Array) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor.view(self.dtype) if self.dtype in _WIDE else tensor


class _Scratch:
    """Accumulators of one thread: memory that has been touched before costs no page faults."""

    def __init__(self, dtype: torch.dtype) -> None:
        with torch.inference_mode(False):
            self.acc = torch.empty(BLOCK, dtype=dtype, device="cpu")
            self.term = torch.empty(BLOCK, dtype=dtype, device="cpu")
        self.array: Array = self.acc.numpy()


def _scratch(dtype: torch.dtype) -> _Scratch:
    mine: dict[Any, _Scratch] = _MINE.__dict__
    found = mine.get(dtype)
    if found is None:
        found = mine[dtype] = _Scratch(dtype)
    return found


@lru_cache(maxsize=1024)
def reduction_of(op: str, dtype: torch.dtype) -> Reduction:
    """The one ``Reduction`` of an op and a dtype; ValueError when there is none."""
    return Reduction(op, dtype)
