"""Copies into what the caller gave."""

import pytest
import torch

from tp3.comm.tensors import copy_back, flat, write


@pytest.mark.parametrize("made", [False, True])
@pytest.mark.parametrize("used", [False, True])
def test_what_inference_mode_made_may_be_written_in_and_outside_of_it(made, used):
    with torch.inference_mode(made):
        target, strided = torch.zeros(2, 3), torch.zeros(3, 2).T
    with torch.inference_mode(used):
        write(target, torch.ones(2, 3))
        data = flat(strided)
        data[:] = flat(torch.full((2, 3), 2.0))
        copy_back(strided, data)
    assert (target == 1).all()
    assert (strided == 2).all()
