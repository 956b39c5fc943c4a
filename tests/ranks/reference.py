"""What every collective must give, computed in numpy from seeds: any rank knows any rank's input.

Data are small integers, exact in every dtype, so results are compared bit by bit. The backend under
test is r4d; TP3_TEST_BACKEND=gloo runs the same checks on Gloo, to test this reference itself.
TP3_TEST_DEVICE=cuda puts the tensors on the GPU, which several ranks may share.
"""

import fnmatch
import functools
import operator
import os

import numpy as np
import torch
import torch.distributed as dist

BACKEND = os.environ.get("TP3_TEST_BACKEND", "r4d")
DEVICE = os.environ.get("TP3_TEST_DEVICE", "cpu")
ON_DEVICE = {} if DEVICE == "cpu" else {"device": DEVICE, "start": "spawn"}  # for launch
SALT = 0x7F3

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
SIGNED = [torch.int8, torch.int16, torch.int32, torch.int64]
UNSIGNED = [torch.uint8, torch.uint16, torch.uint32, torch.uint64]
COMPLEX = [torch.complex64, torch.complex128]
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]
SUMMED = FLOATS + SIGNED + UNSIGNED + COMPLEX
MOVED = [*SUMMED, torch.bool, *FP8]

Op = dist.ReduceOp
OPS = {
    "sum": Op.SUM,
    "product": Op.PRODUCT,
    "min": Op.MIN,
    "max": Op.MAX,
    "avg": Op.AVG,
    "band": Op.BAND,
    "bor": Op.BOR,
    "bxor": Op.BXOR,
}
SIZES = [0, 1, 3, 17, 4097]
LAYOUTS = ["plain", "offset", "strided", "transposed"]


GLOO_LACKS = [
    "*/int16",
    "*/float8*",
    "gather/complex*",
    "layout*",
    "*/stacked",
    "*/premul_sum",
    "*/uneven",
    "*/coalesced",
    "refusal/*",
    "*/uint16",
    "*/uint32",
    "*/uint64",
    "is_completed/reduce_scatter*",
    "*/sum/bool",  # writes bytes other than 0 and 1
    "*/product/bool",
]


def lacks(*what):
    """Whether the tested backend is Gloo and known not to support this; r4d lacks nothing."""
    name = "/".join(str(part).removeprefix("torch.") for part in what)
    return BACKEND == "gloo" and any(fnmatch.fnmatch(name, pattern) for pattern in GLOO_LACKS)


def ops_of(dtype):
    """Names of the ops that are defined on a dtype."""
    if dtype in COMPLEX:
        return ["sum"]
    if dtype in FLOATS:
        return ["sum", "product", "min", "max", "avg"]
    return ["sum", "product", "min", "max", "band", "bor", "bxor"]


def given(rank, shape, dtype, *, op="sum", world_size=1, salt=0):
    """Rank `rank`'s input as an int64, bool or complex128 array."""
    rng = np.random.default_rng([SALT, salt, rank])
    if dtype == torch.bool:
        return rng.integers(0, 2, shape).astype(bool)
    low = 0 if dtype in UNSIGNED else -4
    if op == "product":
        return rng.choice([1, 2] if low == 0 else [-2, -1, 1, 2], shape)
    values = rng.integers(low, 5, shape)
    if dtype in COMPLEX:
        return values + 1j * rng.integers(-4, 5, shape)
    return values * world_size if op == "avg" else values


def everyone(world_size, shape, dtype, *, op="sum", salt=0):
    """The inputs of all ranks."""
    return [
        given(rank, shape, dtype, op=op, world_size=world_size, salt=salt)
        for rank in range(world_size)
    ]


def reduced(op, arrays):
    """`arrays` combined in the order given."""
    if arrays[0].dtype == bool:
        op = {"sum": "bor", "max": "bor", "product": "band", "min": "band"}.get(op, op)
    if op == "avg":
        total = functools.reduce(operator.add, arrays)
        assert not (total % len(arrays)).any()
        return total // len(arrays)
    combine = {
        "sum": operator.add,
        "product": operator.mul,
        "min": np.minimum,
        "max": np.maximum,
        "band": operator.and_,
        "bor": operator.or_,
        "bxor": operator.xor,
    }[op]
    return functools.reduce(combine, arrays)


def tensor(array, dtype):
    return torch.from_numpy(np.array(array)).to(dtype).to(DEVICE)


def poisoned(shape, dtype):
    """A tensor that no result equals by accident."""
    out = torch.empty(shape, dtype=dtype, device=DEVICE)
    if dtype == torch.bool:
        return out.fill_(True)
    if out.numel():
        out.view(-1).view(torch.uint8).fill_(0xA5)
    return out


class Placed:
    """A tensor with the values of `array` inside a larger one that must not change around it."""

    def __init__(self, array, dtype, layout="plain"):
        rows, rest = (array.shape or (1,))[0], array.shape[1:]
        if layout == "plain":
            self.base = poisoned(array.shape, dtype)
            self.view = self.base
        elif layout == "offset":
            self.base = poisoned((rows + 5, *rest), dtype)
            self.view = self.base[3 : 3 + rows]
        elif layout == "strided":
            self.base = poisoned((2 * rows + 1, *rest), dtype)
            self.view = self.base[1 : 2 * rows + 1 : 2]
        else:
            assert layout == "transposed", layout
            self.base = poisoned((*reversed(rest), rows + 2), dtype)
            self.view = self.base.permute(*reversed(range(self.base.ndim)))[1 : 1 + rows]
        self.view.copy_(tensor(array, dtype))
        self.before = self.base.clone()

    def check(self, label, want):
        """The view holds `want` and everything around it is as before."""
        same(label, self.view, tensor(want, self.base.dtype))
        self.view.copy_(self.before.as_strided(*_geometry(self.view)))
        same(f"{label}, memory around the tensor", self.base, self.before)


def _geometry(view):
    return view.shape, view.stride(), view.storage_offset()


def same(label, got, want):
    """Bitwise equality; the error has the first coordinate that differs and both values."""
    if not isinstance(want, torch.Tensor):
        want = tensor(want, got.dtype)
    assert got.dtype == want.dtype, f"{label}: dtype {got.dtype}, expected {want.dtype}"
    assert got.shape == want.shape, f"{label}: shape {got.shape}, expected {want.shape}"
    if not want.numel():
        return
    got, want = got.cpu(), want.cpu()
    left, right = (t.contiguous().view(-1, 1).view(torch.uint8) for t in (got, want))
    differs = (left != right).any(1).nonzero().flatten()
    if differs.numel():
        at = tuple(int(i) for i in np.unravel_index(int(differs[0]), want.shape or (1,)))
        at = at if want.ndim else ()
        raise AssertionError(
            f"{label}: {differs.numel()} of {want.numel()} differ, "
            f"first at {at}: got {got[at].item()}, expected {want[at].item()}"
        )


def call(async_op, function, *args, **kwargs):
    """`function` as a synchronous call or as an asynchronous one that is waited for."""
    work = function(*args, async_op=async_op, **kwargs)
    if not async_op:
        assert work is None, f"a synchronous {function.__name__} returned {work}"
        return
    assert work is not None, f"an asynchronous {function.__name__} returned None"
    work.wait()
    if DEVICE != "cpu":
        torch.cuda.synchronize()  # there wait() orders streams
    if not lacks("is_completed", function.__name__):
        assert work.is_completed(), f"{function.__name__}: not completed after wait()"


def raises(errors, function, *args, **kwargs):
    """The message of the error that `function` must raise."""
    try:
        function(*args, **kwargs)
    except errors as error:
        return str(error)
    raise AssertionError(f"{function.__name__} accepted what it must refuse")
