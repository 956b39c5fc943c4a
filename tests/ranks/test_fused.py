"""``all_reduce_rms_norm`` through torch.distributed: the same bits as an all-reduce and the
reference's steps, at any world size, and what it refuses. On a GPU: ``tests.gpu.test_nq``.
"""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.kernels import norms
from tests.kernels.norms import BF16, NORMS
from tests.ranks.reference import raises, same
from tp3.comm.fused import all_reduce_rms_norm
from tp3.comm.launch import launch
from tp3.kernels import reference
from tp3.kernels.normed import Norm

SHAPES = [(0, 8), (1, 24), (3, 1000), (33, 5120)]  # one-shot and two-shot
WORLD_SIZES = [1, 2, 3, 5]


def group():
    return dist.group.WORLD.group


def call(x, residual, weight, norm, **more):
    return all_reduce_rms_norm(
        x, residual, weight, norm.eps, plus_one=norm.plus_one, quant=norm.quant, **more
    )


def every_norm(rank, world_size):
    for rows, width in SHAPES:
        xs, total = norms.terms(world_size, rows, width)
        residual, weight = norms.values(width, rows, 1), norms.values(width, salt=2)[0]
        for norm in NORMS:
            x = xs[rank].clone()
            result = call(x, residual, weight, norm)
            want = reference.add_rms_norm(total, residual, weight, norm)
            for name, got, wanted in zip(want._fields, result, want, strict=True):
                if wanted is None:
                    assert got is None
                else:
                    same(f"{name} of [{rows}, {width}] {norm}", got, wanted)
            same("x", x, xs[rank])
            same("a view", call(x.T.contiguous().T, residual, weight, norm).out, result.out)
    return group().stats()


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_the_steps_on_cpu(world_size):
    calls = 2 * len(NORMS) * len(SHAPES)
    for stats in launch(every_norm, world_size):
        assert stats.pop("all_reduce_rms_norm/steps") == calls
        assert sum(stats.values()) == calls
        rows = {"identity"} if world_size == 1 else {"one-shot", "two-shot"}
        assert {name.removeprefix("all_reduce/") for name in stats} == rows


def in_a_subgroup(rank, world_size):
    pair = dist.new_group([0, 2])
    if rank == 1:
        return True
    x = torch.full((2, 8), 1.0 + rank, dtype=BF16)
    result = call(x, torch.zeros_like(x), torch.ones(8, dtype=BF16), Norm(0.0), group=pair)
    assert (result.residual_out == 4).all()
    assert (result.out == 1).all()
    return True


def test_a_group_of_some_ranks():
    assert launch(in_a_subgroup, 3) == [True] * 3


def refusals(rank, world_size):
    x, w = torch.zeros(2, 16, dtype=BF16), torch.zeros(16, dtype=BF16)
    meta = torch.device("meta")
    cases = {
        "x is torch.float32; allowed: torch.bfloat16": (x.float(), x, w),
        "residual has shape [1, 16]; allowed: [2, 16]": (x, x[:1], w),
        "allowed: [M, K], K a multiple of 8 up to 16384": (x[:, :9], x, w),
        "got a tensor on meta": (x.to(meta), x.to(meta), w.to(meta)),
    }
    for text, tensors in cases.items():
        assert text in raises(ValueError, all_reduce_rms_norm, *tensors, 1e-6), text
    message = raises(ValueError, all_reduce_rms_norm, x, x, w, 1e-6, quant="row")
    assert "quant is 'row'; allowed: None, 'token', 'group'" in message
    gloo = dist.new_group(backend="gloo")
    message = raises(ValueError, all_reduce_rms_norm, x, x, w, 1e-6, group=gloo)
    assert "allowed: a group of the r4d backend" in message
    assert (all_reduce_rms_norm(x, x, w, 1e-6).out == 0).all(), "the group is still usable"
    return True


def test_what_is_refused_moves_nothing():
    assert launch(refusals, 2, env={"GLOO_SOCKET_IFNAME": "lo"}) == [True] * 2


def disagreement(rank, world_size):
    x, w = torch.zeros(2, 16, dtype=BF16), torch.zeros(16, dtype=BF16)
    quant = "token" if rank else None
    return raises(RuntimeError, all_reduce_rms_norm, x, x, w, 1e-6, quant=quant)


def test_ranks_that_want_different_norms_are_told_both():
    for text in launch(disagreement, 2):
        assert "all_reduce_rms_norm bf16 w eps 1e-06 bfloat16[2, 16]" in text
        assert "all_reduce_rms_norm token w eps 1e-06 bfloat16[2, 16]" in text


def test_pytorch_is_as_near_to_fp64_as_its_dtype_allows():
    """The reference that others are held to: an error of half a unit of bf16, and little more."""
    y, residual, weight = norms.values(5120, 3), norms.values(5120, 3, 1), norms.values(5120)[0]
    for norm in NORMS[:2]:
        got = norms.read(reference.add_rms_norm(y, residual, weight, norm))
        want = norms.exact(y, residual, weight, norm)
        assert (np.abs(got - want) <= np.abs(want) * (2**-8 + 2**-20)).all()
