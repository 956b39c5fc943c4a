"""The terms that all ranks can make: the same in numpy, new for every call, telling of order."""

import itertools

import ml_dtypes
import numpy as np
import pytest
import torch

from tp3.smoke.terms import num_different, ordered_sum, terms

NUMEL = 4096


def lowbias32(x):
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
    return x ^ (x >> np.uint32(16))


def expected(world_size, call):
    index = np.arange(NUMEL, dtype=np.uint32)
    parts = []
    for rank in range(world_size):
        key = (rank * 0x9E3779B9 + call * 0x85EBCA6B + 0x7F3) % 2**32
        bits = lowbias32(index + np.uint32(key))
        exponent = (bits >> 8 & 255).astype(np.float64) * 25 // 256 - 12
        value = (1 + (bits & 127) / 128) * 2**exponent * np.where(bits >> 31, -1, 1)
        if rank == 0:
            from_zero = (bits & 128) != 0
        else:
            value = np.where(from_zero == bool(rank % 2), -parts[-1], value)
        parts.append(value)
    return parts


@pytest.mark.parametrize("call", [0, 1, 599])
def test_the_same_in_numpy(call):
    want = expected(5, call)
    got = terms(5, call, NUMEL)
    for part, values in zip(got, want, strict=True):
        assert (part.double().numpy() == values).all()
    total = np.float32(want[0])
    for values in want[1:]:
        total = total + np.float32(values)
    rounded = total.astype(ml_dtypes.bfloat16).view(np.int16)
    assert (ordered_sum(got).view(torch.int16).numpy() == rounded).all()


def test_what_the_values_are_like():
    first, second, third = terms(3, 7, 1 << 16)
    assert set(first.abs().double().log2().floor().tolist()) == set(range(-12, 13))
    pairs = [first == -second, second == -third]
    assert [round(float(pair.double().mean()), 1) for pair in pairs] == [0.5, 0.5]
    assert (pairs[0] | pairs[1]).all()
    for part in (first, second, third):
        assert 0.45 < float((part < 0).double().mean()) < 0.55


def test_every_rank_and_call_brings_something_else():
    pieces = [part for call in range(4) for part in terms(4, call, NUMEL)]
    for left, right in itertools.combinations(pieces, 2):
        assert num_different(left, right) > NUMEL // 3


def rounded_between(parts):
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


@pytest.mark.parametrize("world_size", [3, 4, 7])
def test_wrong_sums_are_seen(world_size):
    parts = terms(world_size, 11, NUMEL)
    right = ordered_sum(parts)
    assert num_different(ordered_sum([parts[1], parts[0], *parts[2:]]), right) == 0  # a + b = b + a
    for start in range(1, world_size):
        assert num_different(ordered_sum(parts[start:] + parts[:start]), right) > NUMEL // 500
    assert num_different(ordered_sum(parts[::-1]), right) > NUMEL // 500
    assert num_different(rounded_between(parts), right) > NUMEL // 500


def test_a_zero_of_the_other_sign_is_different():
    left, right = torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0])
    assert num_different(left.bfloat16(), right.bfloat16()) == 1
