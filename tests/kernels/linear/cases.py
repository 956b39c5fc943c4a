"""Products to be judged: operands from a seed, truth in fp64, PyTorch's own result in the same
dtypes. For CPU (the interpreter) and GPU alike.

The bound is measured: largest and root mean square error at most twice PyTorch's.
"""

import random
from dataclasses import dataclass, replace
from unittest.mock import patch

import torch

from tests.kernels.linear.memory import CODES, beside_codes
from tp3.kernels import reference
from tp3.kernels.fp8_linear import fp8_linear
from tp3.kernels.grouped_fp8_linear import grouped_fp8_linear
from tp3.kernels.mxfp4_linear import mxfp4_linear
from tp3.kernels.mxfp4_moe import mxfp4_moe

E4M3 = torch.float8_e4m3fn
LAUNCHERS = {
    "mxfp4_linear": mxfp4_linear,
    "mxfp4_moe": mxfp4_moe,
    "fp8_linear": fp8_linear,
    "grouped_fp8_linear": grouped_fp8_linear,
}
SPREADS = ("even", "one token each", "one expert", "half empty", "some none")
X_KINDS = ("bf16", "token", "blocks")  # bf16, or e4m3 scaled per token, or per token and 128 of K
W_KINDS = ("channel", "blocks")
MOST_OVER = 2.0


@dataclass(frozen=True)
class Case:
    """many: groups or experts. spread: of tokens over experts, two choices of each token."""

    kernel: str
    m: int
    n: int
    k: int
    x: str = "bf16"
    w: str = "channel"
    many: int = 1
    spread: str = "even"

    def __str__(self):
        kinds = [self.x] + ([self.w] if "fp8" in self.kernel else [])
        kinds += [f"{self.many} of"] if self.many > 1 else []
        kinds += [self.spread] if self.kernel == "mxfp4_moe" else []
        return f"{self.kernel} {self.m}x{self.n}x{self.k} {' '.join(kinds)}"


def operands(case, device="cpu", seed=0):
    """Arguments of the launcher, in order."""
    made = torch.Generator().manual_seed(seed)

    def scales(*shape):
        return torch.rand(shape, generator=made) + 0.25

    columns = -(-case.k // 128)
    grouped = case.kernel == "grouped_fp8_linear"
    shape = (case.m, case.many, case.k) if grouped else (case.m, case.k)
    x, x_scale = torch.randn(shape, generator=made).bfloat16(), None
    if case.x != "bf16":
        x = x.to(E4M3)
        x_scale = scales(case.m, columns) if case.x == "blocks" else scales(case.m)
    if "mxfp4" in case.kernel:
        rows = (case.many, case.n) if case.kernel == "mxfp4_moe" else (case.n,)
        w = torch.randint(0, 256, (*rows, case.k // 2), generator=made, dtype=torch.uint8)
        w_scale = torch.randint(110, 131, (*rows, case.k // 32), generator=made, dtype=torch.uint8)
    else:
        rows = (case.many, case.n) if grouped else (case.n,)
        w = torch.randn((*rows, case.k), generator=made).to(E4M3)
        blocks = case.w == "blocks" or grouped
        w_scale = scales(*rows[:-1], -(-case.n // 128), columns) if blocks else scales(*rows)
    ids = [expert_ids(case, made)] if case.kernel == "mxfp4_moe" else []
    last = [] if grouped else [x_scale]
    return [t if t is None else t.to(device) for t in (x, w, w_scale, *ids, *last)]


def expert_ids(case, made):
    """[M, 2] of ``many`` experts; -1 is none."""
    shape = (case.m, 2)
    ids = torch.randint(0, case.many, shape, generator=made)
    if case.spread == "one token each":
        ids = torch.arange(2 * case.m).view(shape) % case.many
    elif case.spread == "one expert":
        ids = torch.full(shape, case.many - 1)
    elif case.spread == "half empty":
        ids = ids // 2 * 2
    elif case.spread == "some none":
        ids = torch.where(torch.rand(shape, generator=made) < 0.3, -1, ids)
    return ids


def rounded_by_torch(case, arguments):
    """The same mathematics by PyTorch: weights as bf16, bf16 products, scales of x afterwards."""
    x, w, w_scale, *rest = arguments
    weight = (reference.mxfp4 if "mxfp4" in case.kernel else reference.fp8)(
        w, w_scale, torch.float32
    ).bfloat16()
    x_scale = None if case.kernel == "grouped_fp8_linear" else rest[-1]
    values = reference.rows(x, x_scale if case.x == "blocks" else None, torch.float32).bfloat16()
    if case.kernel == "grouped_fp8_linear":
        return torch.einsum("mgk,gnk->mgn", values, weight)
    if case.kernel == "mxfp4_moe":
        y = values.new_zeros((*rest[0].shape, case.n))
        for expert in range(case.many):
            token, choice = torch.nonzero(rest[0] == expert, as_tuple=True)
            y[token, choice] = values[token] @ weight[expert].mT
        x_scale = x_scale if x_scale is None else x_scale[:, None]
    else:
        y = values @ weight.mT
    return (y.float() * x_scale[..., None]).bfloat16() if case.x == "token" else y


def between_codes(case, arguments):
    """Every operand between NaN codes."""
    codes = [None, CODES["e2m1"] if "mxfp4" in case.kernel else None, *[None] * 3]
    return [
        tensor if tensor is None or tensor.dtype == torch.int64 else beside_codes(tensor, code)
        for tensor, code in zip(arguments, codes)
    ]


def judge(case, device="cpu", seed=0, place=between_codes):
    """Largest error over PyTorch's. Errors: AssertionError that says where."""
    arguments = operands(case, device, seed)
    truth = getattr(reference, case.kernel)(*arguments, dtype=torch.float64)
    theirs = (rounded_by_torch(case, arguments).double() - truth).abs()
    placed = place(case, arguments)
    with poisoned():
        y = LAUNCHERS[case.kernel](*placed)
    assert (y.dtype, y.shape) == (torch.bfloat16, truth.shape), f"{case}: {y.dtype} {y.shape}"
    ours = (y.double() - truth).abs()
    bad = ~(ours <= MOST_OVER * theirs.max())  # also where it is NaN
    if bad.any():
        at = tuple(torch.nonzero(bad)[0].tolist())
        raise AssertionError(
            f"{case}, seed {seed}: {int(bad.sum())} of {bad.numel()} wrong, first at {at}: "
            f"{y[at].item()}, should be {truth[at].item():.9g}; PyTorch errs by at most "
            f"{theirs.max().item():.3g}"
        )
    total, allowed = ours.square().mean().sqrt(), theirs.square().mean().sqrt()
    assert total <= MOST_OVER * allowed, f"{case}, seed {seed}: {total} against {allowed}"
    return (ours.max() / theirs.max()).item() if theirs.max() else 0.0


def poisoned():
    """Inside, ``torch.empty`` is full of NaN."""
    empty = torch.empty
    return patch.object(
        torch, "empty", lambda *args, **options: empty(*args, **options).fill_(torch.nan)
    )


# Of ten random cases; experts and groups take the interpreter longest.
TURNS = ["mxfp4_linear", "fp8_linear"] * 4 + ["mxfp4_moe", "grouped_fp8_linear"]


def random_cases(count, seed, most_m=17, most_n=120, most_k=300):
    chance = random.Random(seed)
    return [
        _random_case(TURNS[i % len(TURNS)], chance, most_m, most_n, most_k) for i in range(count)
    ]


def _random_case(kernel, chance, most_m, most_n, most_k):
    unit = 32 if "mxfp4" in kernel else 16

    def some(most):
        return min(most, 1 + int(most ** chance.uniform(0.2, 1)))

    case = Case(kernel, some(most_m), 7 + some(most_n), unit * some(most_k // unit))
    if kernel == "mxfp4_moe":
        return replace(
            case, x=chance.choice(X_KINDS[:2]), many=chance.choice((2, 3, 5)),
            spread=chance.choice(SPREADS),
        )  # fmt: skip
    if kernel == "grouped_fp8_linear":
        return replace(case, w="blocks", many=chance.choice((2, 3, 4, 8)))
    if kernel == "fp8_linear":
        return replace(case, x=chance.choice(X_KINDS), w=chance.choice(W_KINDS))
    return replace(case, x=chance.choice(X_KINDS[:2]))
