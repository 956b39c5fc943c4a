"""The one sum: ``((x0 + x1) + x2) + …`` in rank order, accumulated wide, rounded once.

fp16 and bf16 accumulate in fp32, fp32 and fp64 in themselves, integers wrap around exactly. Every
algorithm calls ``Reduction.combine``, so no result depends on which one ran. Blocks of 32 Ki
elements keep the accumulator in cache.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from tp3.comm.tensors import chunks

BLOCK = 32 << 10
_MINE = threading.local()

_BINARY: dict[str, Callable[..., Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PREMUL_SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
OPS = tuple(_BINARY)
_NAMES = {getattr(ReduceOp.RedOpType, name): name for name in OPS}
# A sum of truths is "any", a product is "all"; as in NCCL.
_BOOL_OPS = {"SUM": "BOR", "MAX": "BOR", "PRODUCT": "BAND", "MIN": "BAND"}
_BITWISE = ("BAND", "BOR", "BXOR")
_LINEAR = ("SUM", "AVG", "PREMUL_SUM")
_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_SIGNED = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
# torch has no arithmetic for these: the signed twin has the same sums and products, and the same
# order once the sign bit is flipped.
_UNSIGNED = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
}
_COMPLEX = {torch.complex64: torch.float32, torch.complex128: torch.float64}

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
    """A reduce op on a dtype: what to view the data as, how to accumulate, how to finish.

    ``view`` is the dtype that flat data are viewed as before ``combine``; it has as many bytes per
    element as the original (complex: half).
    """

    op: str
    dtype: torch.dtype
    view: torch.dtype = field(init=False)
    wide: torch.dtype = field(init=False)

    def __post_init__(self) -> None:
        allowed = ALLOWED.get(self.dtype)
        if allowed is None:
            names = ", ".join(str(dtype)[6:] for dtype in ALLOWED)
            raise ValueError(f"r4d cannot reduce {self.dtype}; allowed: {names}")
        if self.op not in allowed:
            raise ValueError(f"r4d has no {self.op} of {self.dtype}; allowed: {', '.join(allowed)}")
        view = _UNSIGNED.get(self.dtype) or _COMPLEX.get(self.dtype) or self.dtype
        view = torch.uint8 if self.dtype is torch.bool else view
        set_ = object.__setattr__
        set_(self, "view", view)
        set_(self, "wide", _WIDE.get(view, view))

    @property
    def _flips(self) -> bool:
        return self.dtype in _UNSIGNED and self.op in ("MIN", "MAX")

    @property
    def _binary(self) -> Callable[..., Tensor]:
        op = _BOOL_OPS.get(self.op, self.op) if self.dtype is torch.bool else self.op
        return _BINARY[op]

    def combine(self, parts: Sequence[Tensor], out: Tensor) -> None:
        """Write the reduction of ``parts`` (rank order, flat, of dtype ``view``) to ``out``.

        ``out`` may be one of the parts: each block is read entirely before it is written.
        """
        numel = out.numel()
        if len(parts) == 1:
            out.copy_(parts[0])
        elif self.wide is not self.view:
            self._combine_wide(parts, out, numel)
        elif self._flips or self.op == "AVG" or len(parts) > 2:
            self._combine_same(parts, out, numel)
        else:
            self._binary(parts[0], parts[1], out=out)

    def _combine_same(self, parts: Sequence[Tensor], out: Tensor, numel: int) -> None:
        binary, flip = self._binary, self._flips
        acc, _ = _scratch(self.view, min(numel, BLOCK))
        for target, *block in _blocks(out, *parts):
            if flip:
                sign = torch.iinfo(self.view).min
                block = [part ^ sign for part in block]
            a = acc if acc.numel() == target.numel() else acc[: target.numel()]
            total = block[0]
            for part in block[1:-1]:
                total = binary(total, part, out=a)
            finishes = flip or self.op == "AVG"
            total = binary(total, block[-1], out=a if finishes else target)
            if self.op == "AVG":
                whole = None if self.view.is_floating_point else "trunc"
                torch.div(total, len(parts), rounding_mode=whole, out=target)
            elif flip:
                torch.bitwise_xor(total, sign, out=target)

    def _combine_wide(self, parts: Sequence[Tensor], out: Tensor, numel: int) -> None:
        binary = self._binary
        size = min(numel, BLOCK)
        acc, term = _scratch(self.wide, size)
        for target, first, *others in _blocks(out, *parts):
            length = target.numel()
            a, t = (acc, term) if length == size else (acc[:length], term[:length])
            a.copy_(first)
            for part in others:
                t.copy_(part)
                binary(a, t, out=a)
            if self.op == "AVG":
                a.div_(len(parts))
            target.copy_(a)


def _scratch(dtype: torch.dtype, numel: int) -> tuple[Tensor, Tensor]:
    """Two accumulators of this thread: memory that has been touched before costs no page faults."""
    both = getattr(_MINE, "scratch", None)
    if both is None:
        with torch.inference_mode(False):
            both = _MINE.scratch = torch.empty(2, BLOCK * 8, dtype=torch.uint8, device="cpu")
    nbytes = numel * dtype.itemsize
    return both[0, :nbytes].view(dtype), both[1, :nbytes].view(dtype)


def _blocks(*tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """The tensors, all of one length, cut alike into blocks."""
    return zip(*(chunks(tensor, BLOCK) for tensor in tensors), strict=True)


@lru_cache(maxsize=1024)
def reduction_of(op: str, dtype: torch.dtype) -> Reduction:
    """The one ``Reduction`` of an op and a dtype; ValueError when there is none."""
    return Reduction(op, dtype)
