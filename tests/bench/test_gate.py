"""The gate takes a right sum and nothing else."""

import pytest
import torch

from tp3.bench.gate import UNIT_ROUNDOFF, fault_of, judge, rank_data

WORLD_SIZE, NUMEL, AT = 3, 1000, 17
DTYPES = list(UNIT_ROUNDOFF)


def data(dtype):
    """Values of all ranks and their sum: fp32 in rank order, rounded once."""
    xs = torch.stack([rank_data(r, NUMEL, dtype) for r in range(WORLD_SIZE)])
    total = xs[0].float()
    for x in xs[1:]:
        total = total + x.float()
    return xs, total.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_sum_in_rank_order_holds(dtype):
    xs, total = data(dtype)
    verdicts = [judge(rank, total, xs, exact=True) for rank in range(WORLD_SIZE)]
    assert fault_of(verdicts, exact=True) == ""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wrong", ["4 ulp", "nan", "unreduced"])
def test_a_wrong_element_is_named(dtype, wrong):
    xs, total = data(dtype)
    total[AT] = {
        "4 ulp": total[AT] * (1 + 8 * UNIT_ROUNDOFF[dtype]),
        "nan": torch.nan,
        "unreduced": xs[1, AT],
    }[wrong]
    assert judge(1, total, xs, exact=True).fault.startswith(f"rank 1 element {AT}: got ")


def test_a_peer_may_round_at_every_step():
    xs, _ = data(torch.bfloat16)
    total = (xs[0] + xs[1]) + xs[2]
    assert judge(0, total, xs, exact=True).fault
    assert not judge(0, total, xs, exact=False).fault
    total[AT] = torch.nan
    assert judge(0, total, xs, exact=False).fault


def test_other_bits_on_one_rank_are_a_fault_of_r4d_only():
    xs = torch.zeros(WORLD_SIZE, NUMEL)
    total = xs.sum(0)
    verdicts = [judge(rank, -total if rank == 2 else total, xs, exact=True) for rank in range(3)]
    assert fault_of(verdicts, exact=True) == "rank 2 ended with other bits than rank 0"
    assert fault_of(verdicts, exact=False) == ""
