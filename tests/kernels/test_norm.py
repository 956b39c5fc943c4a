"""The norm's plain kernel in the interpreter: bits against numpy where IEEE settles them, else an
error of at most twice PyTorch's.
"""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from tests.kernels import norms
from tests.kernels.norms import BF16, E4M3, NORMS, Placed
from tests.ranks.reference import same
from tp3.kernels import reference
from tp3.kernels.norm import add_rms_norm, e4m3_codes
from tp3.kernels.normed import SMALLEST_SCALE, Norm

WIDTHS = [8, 24, 120, 128, 136, 1000, 5120, 16384]
ROWS = [0, 1, 3]


def operands(rows, width):
    y, residual = norms.values(width, rows), norms.values(width, rows, 1)
    return y, residual, norms.values(width, salt=2)[0]


def every_width():
    """The largest error over PyTorch's."""
    worst = 0.0
    for width in WIDTHS:
        for rows in ROWS:
            y, residual, weight = operands(rows, width)
            for norm in NORMS:
                worst = max(worst, judged(y, residual, weight, norm))
    return worst


def judged(y, residual, weight, norm):
    label = f"{list(y.shape)} {norm}"
    place = Placed(y, norm)
    result = add_rms_norm(y, residual, weight, norm, place.normed)
    n = add_rms_norm(y, residual, weight, Norm(norm.eps, norm.plus_one)).out
    out, scale = (n, None) if norm.quant is None else norms.codes(n, norm.quant)
    kept = torch.from_numpy(norms.kept(y.float().numpy(), residual)).to(BF16)
    place.check(label, (out, kept, scale))
    if not y.numel():
        return 0.0
    want = norms.exact(y, residual, weight, norm)
    theirs = norms.read(reference.add_rms_norm(y, residual, weight, norm))
    ours = np.abs(norms.read(result) - want).max()
    return ours / np.abs(theirs - want).max()


def test_bits_and_errors_at_odd_widths(interpreter):
    assert interpreter.alone(every_width) <= 2


def views():
    """Rows that do not start at multiples of 16 bytes, and not contiguous ones."""
    y, residual, weight = operands(3, 24)
    norm = Norm(1e-5, True, "token")
    want = add_rms_norm(y, residual, weight, norm)
    base = torch.zeros(3, 30, dtype=BF16)
    base[:, 3:27] = y
    shifted = torch.zeros(25, dtype=BF16)
    shifted[1:] = weight
    got = add_rms_norm(base[:, 3:27], residual.T.contiguous().T, shifted[1:], norm)
    for name, ours, theirs in zip(want._fields, got, want):
        same(name, ours, theirs)
    return True


def test_views_of_any_alignment(interpreter):
    assert interpreter.alone(views)


def special_rows(quant):
    """Zeros, a NaN, an infinity, the largest numbers, subnormal ones."""
    y = torch.zeros(5, 256, dtype=BF16)
    y[1:] = norms.values(256, 4)
    y[1, 7], y[2, 7] = torch.nan, torch.inf
    y[3] = torch.finfo(BF16).max
    y[4] = 2.0**-130
    result = add_rms_norm(
        y, torch.zeros_like(y), torch.ones(256).bfloat16(), Norm(1e-6, quant=quant)
    )
    return [t if t is None else t.float() for t in result]


@pytest.mark.parametrize("quant", [None, "token", "group"])
def test_nothing_plausible_comes_of_nan_and_infinity(interpreter, quant):
    out, kept, scale = interpreter.alone(special_rows, quant)
    assert not out[0].any()
    assert not kept[0].any()
    assert kept[1, 7].isnan()
    assert kept[2, 7] == torch.inf
    assert out[1].isnan().all(), "the sum of squares is NaN"
    assert out[2, 7].isnan(), "infinity over infinity"
    if quant == "token":
        assert scale[0] == torch.tensor(SMALLEST_SCALE)
        assert scale[1:3].isnan().all()
        assert out[2].isnan().all()
    if quant == "group":
        assert (scale[0] == torch.tensor(SMALLEST_SCALE)).all()
        assert scale[1].isnan().all()
        assert scale[2].isnan().tolist() == [True, False]
        assert out[2, :128].isnan().all()
    assert not out[4].isnan().any()


@triton.jit
def codes_kernel(x, out, NUM: tl.constexpr):
    at = tl.arange(0, NUM)
    tl.store(out + at, e4m3_codes(tl.load(x + at), False))


def wrong_codes():
    """Among all magnitudes of bf16, and fp32 on both sides of every tie: how many are wrong."""
    exact = torch.arange(127, dtype=torch.uint8).view(E4M3).float()
    ties = (exact[:-1] + exact[1:]) / 2
    bf16 = torch.arange(2**15, dtype=torch.int32).to(torch.int16).view(BF16).float()
    x = torch.cat(
        (exact, ties, bf16, *(torch.nextafter(ties, end) for end in (exact[1:], exact[:-1])))
    )
    x = torch.cat((x, -x))
    x = torch.nn.functional.pad(x, (0, triton.next_power_of_2(x.numel()) - x.numel()))
    out = torch.empty(x.numel(), dtype=torch.uint8)
    codes_kernel[(1,)](x, out, x.numel())
    want = x.clamp(-448, 448).to(E4M3).view(torch.uint8)
    return int((torch.where(x.isnan(), 0x7F, want) != out).sum())


def test_every_tie_of_e4m3_goes_to_even(interpreter):
    assert interpreter.alone(wrong_codes) == 0


def refused(what):
    y, residual, weight = operands(2, 16)
    changes = {
        "x is torch.float32": (y.float(), residual, weight),
        "weight is torch.float32": (y, residual, weight.float()),
        "x has shape [2, 12]": (y[:, :12], residual, weight),
        "x has shape [16]": (y[0], residual, weight),
        "x has shape [1, 16392]": (torch.zeros(1, 16392, dtype=BF16), residual, weight),
        "residual has shape [1, 16]": (y, residual[:1], weight),
        "weight has shape [8]": (y, residual, weight[:8]),
    }
    with pytest.raises(ValueError) as error:
        add_rms_norm(*changes[what], Norm(1e-6))
    return str(error.value)


@pytest.mark.parametrize(
    "what",
    [
        "x is torch.float32",
        "weight is torch.float32",
        "x has shape [2, 12]",
        "x has shape [16]",
        "x has shape [1, 16392]",
        "residual has shape [1, 16]",
        "weight has shape [8]",
    ],
)
def test_what_is_refused(interpreter, what):
    message = interpreter.alone(refused, what)
    assert message.startswith(what)
    assert "allowed: " in message


@pytest.mark.parametrize(
    ("change", "what"), [({"quant": "row"}, "quant is 'row'"), ({"eps": -1.0}, "eps is -1.0")]
)
def test_norms_that_are_refused(change, what):
    with pytest.raises(ValueError, match=what):
        Norm(**{"eps": 1e-6, **change})
