"""What the judge must reject: a bound left out, an element not written, parts added twice."""

import pytest
import torch

from tests.kernels.linear.cases import Case, between_codes, judge
from tests.kernels.linear.memory import Walls
from tests.kernels.linear.test_shapes import walled

TAILS = [
    Case("mxfp4_linear", 3, 36, 96),  # K % 64 == 32
    Case("mxfp4_linear", 9, 36, 96),
    Case("mxfp4_moe", 3, 36, 96, many=2),
    Case("fp8_linear", 3, 36, 208, w="blocks"),
    Case("grouped_fp8_linear", 3, 36, 208, w="blocks", many=2),
    Case("grouped_fp8_linear", 9, 36, 208, w="blocks", many=2),
]


def unbounded(case, walls):
    """The case without the bound of the last slab."""
    from tp3.kernels import fp8_few, fp8_linear, mxfp4_few, mxfp4_linear

    for module in (fp8_few, fp8_linear, mxfp4_few, mxfp4_linear):
        module.below = lambda offsets, limit: offsets >= 0
    if not walls:
        return judge(case, place=between_codes)
    keep = Walls()
    return judge(case, place=lambda case, arguments: walled(keep, arguments))


@pytest.mark.parametrize("case", TAILS, ids=str)
def test_without_the_bound_the_result_is_wrong(interpreter, case):
    with pytest.raises(AssertionError, match=r"wrong, first at"):
        interpreter.alone(unbounded, case, False)


@pytest.mark.parametrize("case", TAILS, ids=str)
def test_without_the_bound_memory_beyond_is_read(interpreter, case):
    with pytest.raises(AssertionError, match=r"SIGSEGV|signal 11"):
        interpreter.alone(unbounded, case, True)


def without_the_last_part(case):
    """One split of K is not added."""
    from tp3.kernels import fp8_linear, mxfp4_linear, split_k

    started = split_k.start
    split_k.start = lambda kernel, warps, device, grid, args, **constants: started(
        kernel, warps, device, grid, (*args[:3], args[3] - 1), **constants
    )
    assert mxfp4_linear.combined is fp8_linear.combined is split_k.combined
    return judge(case)


@pytest.mark.parametrize(
    "case",
    [
        Case("mxfp4_linear", 2, 17, 5824),
        Case("mxfp4_linear", 9, 17, 1472),
        Case("grouped_fp8_linear", 2, 17, 2048, w="blocks", many=2),
    ],
    ids=str,
)
def test_a_part_that_is_not_added_is_seen(interpreter, case):
    with pytest.raises(AssertionError, match="wrong, first at"):
        interpreter.alone(without_the_last_part, case)


def unwritten(case):
    """One row of y is left as it was."""
    from tests.kernels.linear import cases

    launcher = cases.LAUNCHERS[case.kernel]

    def all_but_one(*arguments):
        y = launcher(*arguments)
        y[-1] = torch.empty_like(y[-1]).fill_(torch.nan)
        return y

    cases.LAUNCHERS[case.kernel] = all_but_one
    return judge(case)


def test_an_element_that_is_not_written_is_seen(interpreter):
    with pytest.raises(AssertionError, match="nan, should be"):
        interpreter.alone(unwritten, Case("fp8_linear", 2, 17, 96))
