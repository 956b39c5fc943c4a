"""The same products and codes on a GPU, and captured in a graph."""

from dataclasses import replace

import pytest
import torch

from tests.kernels.linear.cases import LAUNCHERS, Case, judge, operands, random_cases
from tests.kernels.linear.codes import wrong_e2m1, wrong_e4m3, wrong_groups, wrong_products
from tests.kernels.linear.test_shapes import FP8, MOE, MXFP4

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a GPU"),
    pytest.mark.timeout(300),
]

FEW = [case for case in FP8 if case.kernel == "grouped_fp8_linear" and case.m <= 8]


def test_codes_are_exact():
    assert (wrong_e2m1("cuda"), wrong_e4m3("cuda")) == (0, 0)
    assert (wrong_products("cuda"), wrong_groups("cuda")) == (0, 0)


@pytest.mark.parametrize("case", [*MXFP4, *FP8, *MOE], ids=str)
def test_local_shapes(case):
    judge(case, "cuda")


def test_random_shapes():
    for seed, case in enumerate(random_cases(200, 0, most_m=300, most_n=9000, most_k=6000)):
        judge(case, "cuda", seed)


@pytest.mark.parametrize("case", [MXFP4[0], FP8[0], *FEW[:1], FP8[-1], MOE[0]], ids=str)
def test_a_graph_gives_the_same_bits(case):
    arguments = operands(case, "cuda")
    launcher = LAUNCHERS[case.kernel]
    want = launcher(*arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = launcher(*arguments)
    for _ in range(3):
        got.fill_(torch.nan)
        graph.replay()
        assert torch.equal(got, want)


@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize(
    "case",
    [
        Case("mxfp4_linear", 1, 5120, 5824),
        Case("grouped_fp8_linear", 1, 1024, 4096, w="blocks", many=4),
    ],
    ids=str,
)
def test_two_runs_give_the_same_bits(case, rows):
    launcher, arguments = LAUNCHERS[case.kernel], operands(replace(case, m=rows), "cuda")
    first = launcher(*arguments)
    assert all(torch.equal(first, launcher(*arguments)) for _ in range(20))
