"""Codecs in the interpreter, bit by bit; the reference itself against PyTorch's dtypes."""

import pytest
import torch

from tests.kernels.linear.codes import wrong_e2m1, wrong_e4m3, wrong_groups, wrong_products
from tp3.kernels import reference


def test_every_code_with_every_scale_is_exact(interpreter):
    assert interpreter.alone(wrong_e2m1) == 0


def test_every_e4m3_code_is_exact(interpreter):
    assert interpreter.alone(wrong_e4m3) == 0


def test_every_weight_comes_out_of_a_product_of_few_rows(interpreter):
    assert interpreter.alone(wrong_products) == 0


def test_every_weight_comes_out_of_groups_of_few_rows(interpreter):
    assert interpreter.alone(wrong_groups) == 0


def _with_nan_as_480():
    from tp3.kernels import codecs

    def finite(words, J):
        words = words << 8 if J == 0 else words
        return (words & 0x80008000) | ((words >> 4) & 0x07F007F0)

    codecs.e4m3_pair = finite
    return wrong_groups()


def test_nan_read_as_a_number_is_seen(interpreter):
    with pytest.raises(AssertionError):
        interpreter.alone(_with_nan_as_480)


def _without_the_second_way():
    from tp3.kernels import mxfp4_few

    mxfp4_few.LARGEST_CODE = type(mxfp4_few.LARGEST_CODE)(1000)
    return wrong_products()


def test_large_scales_multiplied_once_are_seen(interpreter):
    with pytest.raises(AssertionError):
        assert interpreter.alone(_without_the_second_way) == 0


def _with_half_the_factor():
    from tp3.kernels import codecs

    codecs.E2M1_FACTOR_PAIR = type(codecs.E2M1_FACTOR_PAIR)(0x7E007E00)
    return wrong_e2m1()


def test_a_wrong_factor_is_seen(interpreter):
    assert interpreter.alone(_with_half_the_factor) > 50_000


def test_the_reference_is_what_pytorch_reads():
    codes = torch.arange(256, dtype=torch.uint8)
    for ours, theirs in (
        (reference.e4m3(codes, torch.float32), codes.view(torch.float8_e4m3fn)),
        (reference.e8m0(codes, torch.float32), codes.view(torch.float8_e8m0fnu)),
    ):
        torch.testing.assert_close(ours, theirs.float(), rtol=0, atol=0, equal_nan=True)
    low, high = reference.e2m1(codes, torch.float64).unflatten(0, (256, 2)).T
    assert low[:16].tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert torch.equal(high[::16], low[:16])
