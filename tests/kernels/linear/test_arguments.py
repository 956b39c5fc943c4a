"""What launchers refuse, by name, got and allowed; empty inputs; operators of torch."""

import re

import pytest
import torch

from tests.kernels.linear.cases import LAUNCHERS, Case, operands
from tp3.kernels import few, fp8_linear, mxfp4_linear, ops
from tp3.kernels import operands as launching

MXFP4 = Case("mxfp4_linear", 3, 36, 96)
FP8 = Case("fp8_linear", 3, 36, 96)
GROUPED = Case("grouped_fp8_linear", 3, 36, 96, many=2)
MOE = Case("mxfp4_moe", 3, 36, 96, many=2)
CASES = [MXFP4, FP8, GROUPED, MOE]


def bytes_like(*shape):
    return torch.zeros(shape, dtype=torch.uint8)


# Case, which argument, what it becomes, what is said.
REFUSED = [
    (MXFP4, 0, lambda x: x.float(), "x is torch.float32; allowed: torch.bfloat16 or torch.float8"),
    (MXFP4, 0, lambda x: x[:, :64], "x has shape [3, 64]; allowed: [any, 96]"),
    (MXFP4, 0, lambda x: x[None], "x has shape [1, 3, 96]; allowed: [any, 96]"),
    (MXFP4, 0, lambda x: x.to(torch.float8_e4m3fn), "x is torch.float8_e4m3fn without x_scale"),
    (MXFP4, 1, lambda w: bytes_like(36, 40), "weight has rows of 40 bytes; allowed: multiples of"),
    (MXFP4, 1, lambda w: w.view(torch.int8), "weight is torch.int8; allowed: torch.uint8"),
    (MXFP4, 1, lambda w: bytes_like(36, 96)[:, ::2], "weight has strides (96, 2); allowed: a con"),
    (MXFP4, 1, lambda w: bytes_like(36 * 48 + 1)[1:].view(36, 48), "weight starts at an address"),
    (MXFP4, 2, lambda s: s[:, :2], "scales has shape [36, 2]; allowed: [36, 3]"),
    (MXFP4, 2, lambda s: s.float(), "scales is torch.float32; allowed: torch.uint8"),
    (MXFP4, 3, lambda _: torch.ones(3), "x is torch.bfloat16 with x_scale"),
    (MOE, 3, lambda ids: ids.float(), "expert_ids is torch.float32; allowed: torch.int32 or"),
    (MOE, 3, lambda ids: ids[:2], "expert_ids has shape [2, 2]; allowed: [3, any]"),
    (FP8, 1, lambda w: w.view(torch.uint8), "weight is torch.uint8; allowed: torch.float8_e4m3fn"),
    (FP8, 1, lambda w: w[:, :80], "weight has shape [36, 80]; allowed: [any, 96]"),
    (FP8, 2, lambda s: s[:35], "weight_scale has shape [1, 35]; allowed: [1, 36]"),
    (FP8, 2, lambda s: torch.ones(2, 1), "weight_scale has shape [1, 2, 1]; allowed: [1, 1, 1]"),
    (GROUPED, 0, lambda x: x[:, :1], "x has shape [3, 1, 96]; allowed: [any, 2, 96]"),
    (GROUPED, 2, lambda s: s[:1], "weight_scale has shape [1, 1, 1]; allowed: [2, 1, 1]"),
]


def refusals():
    """What is said of each."""
    said = []
    for case, place, change, _ in REFUSED:
        arguments = operands(case)
        arguments[place] = change(arguments[place])
        try:
            LAUNCHERS[case.kernel](*arguments)
            said.append("nothing")
        except ValueError as error:
            said.append(str(error))
    return said


def test_refusals_name_argument_got_and_allowed(interpreter):
    said = interpreter.alone(refusals)
    for got, (case, place, _, wanted) in zip(said, REFUSED):
        assert got.startswith(wanted), f"{case}, argument {place}: {got}"
        assert re.search(r"; allowed: .", got), got


def test_a_width_that_no_thread_loads_at_once_is_refused(interpreter):
    assert "rows of 72; allowed: multiples of 16" in interpreter.alone(_odd_width)


def _odd_width():
    x, w = torch.zeros(3, 72).bfloat16(), torch.zeros(36, 72).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError) as refused:
        LAUNCHERS["fp8_linear"](x, w, torch.ones(36))
    return str(refused.value)


def test_outside_the_interpreter_a_gpu_is_wanted():
    if torch.cuda.is_available():
        return
    with pytest.raises(ValueError, match=r"weight is on cpu; allowed: a GPU"):
        LAUNCHERS["mxfp4_linear"](*operands(MXFP4))


def empties():
    shapes = []
    for case in CASES:
        full = operands(case)
        none = [full[0][:0], *full[1:]]
        if case is MOE:
            none[3] = none[3][:0]
        shapes.append(tuple(LAUNCHERS[case.kernel](*none).shape))
        if case in (MXFP4, FP8):
            none = [full[0], full[1][:0], full[2][:0], full[3]]
            shapes.append(tuple(LAUNCHERS[case.kernel](*none).shape))
    return shapes


def test_empty_inputs_give_empty_outputs(interpreter):
    assert interpreter.alone(empties) == [
        (0, 36), (3, 0), (0, 36), (3, 0), (0, 2, 36), (0, 2, 36)
    ]  # fmt: skip


def strided(case):
    """Rows of x apart, at an odd address, columns of a wider tensor, and (groups) rows and groups
    the other way round: all the same y.
    """
    x, *rest = operands(case)
    launcher = LAUNCHERS[case.kernel]
    slices = (slice(8, 104), slice(1, 97), slice(0, 192, 2))
    wide = [torch.full((*x.shape[:-1], 200), torch.nan).bfloat16() for _ in slices]
    views = [tensor[..., columns] for tensor, columns in zip(wide, slices)]
    views.append(torch.empty_like(x.transpose(0, -2).contiguous()).transpose(0, -2))
    for view in views:
        view.copy_(x)
    return [torch.equal(launcher(x, *rest), launcher(view, *rest)) for view in views]


@pytest.mark.parametrize("case", [MXFP4, GROUPED], ids=str)
def test_x_may_be_a_view(interpreter, case):
    assert interpreter.alone(strided, case) == [True] * 4


def as_operators():
    """Checked by torch.library, compiled whole, equal to the launchers."""
    ops.register()
    ops.register()
    for case in CASES:
        arguments = operands(case)
        operator = getattr(torch.ops.tp3, case.kernel)
        # Checking the schema multiplies arguments, which PyTorch cannot do in e4m3.
        checks = ("test_schema", "test_faketensor")[case in (FP8, GROUPED) :]
        torch.library.opcheck(operator.default, tuple(arguments), test_utils=checks)
        compiled = torch.compile(
            lambda *a, operator=operator: operator(*a) * 2, backend="aot_eager", fullgraph=True
        )
        assert torch.equal(compiled(*arguments), LAUNCHERS[case.kernel](*arguments) * 2), case
    return len(CASES)


def test_operators(interpreter):
    assert interpreter.alone(as_operators) == 4


def kernels_of(case):
    """What its launcher starts."""
    started = []
    for module in (fp8_linear, mxfp4_linear):
        module.start = lambda kernel, *_, **__: started.append(kernel.fn.__name__)
    LAUNCHERS[case.kernel](*operands(case))
    return started


# Rows of x and the kernel; a slab of K, so that nothing is added.
STARTED = [
    (Case("mxfp4_linear", 8, 36, 96), "mxfp4_few_kernel"),
    (Case("mxfp4_linear", 9, 36, 96), "mxfp4_linear_kernel"),
    (Case("grouped_fp8_linear", 1, 36, 96, many=2), "fp8_few_kernel"),
    (Case("grouped_fp8_linear", 8, 36, 96, many=2), "fp8_few_kernel"),
    (Case("grouped_fp8_linear", 9, 36, 96, many=2), "fp8_linear_kernel"),
    (Case("fp8_linear", 8, 36, 96, w="blocks"), "fp8_linear_kernel"),
]


@pytest.mark.parametrize(("case", "kernel"), STARTED, ids=str)
def test_few_rows_have_kernels_of_their_own(interpreter, case, kernel):
    assert interpreter.alone(kernels_of, case) == [kernel]


@pytest.mark.parametrize("straight", [True, False])
@pytest.mark.parametrize("able", [True, False])
def test_few_rows_have_them_where_weights_stay_in_registers(monkeypatch, able, straight):
    monkeypatch.setattr(few, "INTERPRETED", False)
    monkeypatch.setattr(few, "STRAIGHT", straight)
    monkeypatch.setattr(few, "multiplies_pairs", lambda device: able)
    for rows in (1, 8, 9):
        x = torch.zeros(rows, 32)
        assert few.serves(x.bfloat16()) == (able and straight and rows <= 8)
        assert not few.serves(x.to(torch.float8_e4m3fn))


@pytest.mark.parametrize(
    ("capability", "able"),
    [((8, 6), (False, False)), ((8, 9), (False, True)), ((9, 0), (True, True))],
)
def test_what_only_some_gpus_do(monkeypatch, capability, able):
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(launching, "_capability", launching._capability.__wrapped__)
    device = torch.device("cuda", 0)
    assert (launching.starts_early(device), launching.multiplies_e4m3(device)) == able
    monkeypatch.setattr(torch.version, "hip", "7")
    assert (launching.starts_early(device), launching.multiplies_e4m3(device)) == (False, False)
