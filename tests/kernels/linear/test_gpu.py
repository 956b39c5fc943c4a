"""The same products and codes on a GPU, and captured in a graph."""

import pytest
import torch

from tests.kernels.linear.cases import LAUNCHERS, Case, judge, operands, random_cases
from tests.kernels.linear.codes import wrong_e2m1, wrong_e4m3, wrong_products
from tests.kernels.linear.test_shapes import FP8, MOE, MXFP4

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a GPU"),
    pytest.mark.timeout(300),
]


def test_codes_are_exact():
    assert (wrong_e2m1("cuda"), wrong_e4m3("cuda"), wrong_products("cuda")) == (0, 0, 0)


@pytest.mark.parametrize("case", [*MXFP4, *FP8, *MOE], ids=str)
def test_local_shapes(case):
    judge(case, "cuda")


def test_random_shapes():
    for seed, case in enumerate(random_cases(200, 0, most_m=300, most_n=9000, most_k=6000)):
        judge(case, "cuda", seed)


@pytest.mark.parametrize("case", [MXFP4[0], FP8[0], FP8[-1], MOE[0]], ids=str)
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
def test_two_runs_give_the_same_bits(rows):
    arguments = operands(Case("mxfp4_linear", rows, 5120, 5824), "cuda")
    first = LAUNCHERS["mxfp4_linear"](*arguments)
    assert all(torch.equal(first, LAUNCHERS["mxfp4_linear"](*arguments)) for _ in range(20))
