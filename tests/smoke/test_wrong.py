"""The smoke's judgement of a result: a value that is off is named, and a NaN is off."""

import math

import pytest
import torch

from tp3.smoke.collectives import CASES, rank_data, wrong

XS = torch.stack([rank_data(rank, 12, torch.float32) for rank in range(3)])


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e-3])
def test_one_element_that_is_off_is_named(value):
    out = XS.double().sum(0).float()
    assert wrong(CASES["all_reduce"], out, XS, 0) == ""
    out[5] += value
    assert wrong(CASES["all_reduce"], out, XS, 0).startswith("rank 0 element 5: got")
