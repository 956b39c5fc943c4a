"""The examples of the kernels' docstrings, and the tile table."""

import pytest
import torch

from tests.kernels.linear.cases import E4M3
from tp3.kernels.tiles import Tile, split_of


def examples():
    from tp3.kernels.fp8_linear import fp8_linear
    from tp3.kernels.grouped_fp8_linear import grouped_fp8_linear
    from tp3.kernels.mxfp4_linear import mxfp4_linear
    from tp3.kernels.mxfp4_moe import mxfp4_moe
    from tp3.kernels.operands import start
    from tp3.kernels.split_k import PART, combine_kernel

    def row(*values):
        x = torch.zeros(1, 32)
        x[0, : len(values)] = torch.tensor(values)
        return x.bfloat16()

    packed, scale = torch.zeros(1, 16, dtype=torch.uint8), torch.tensor([[128]], dtype=torch.uint8)
    packed[0, 0] = 2 | 12 << 4
    y = [mxfp4_linear(row(1.0, 1.0), packed, scale).flatten()]
    experts = torch.zeros(2, 1, 16, dtype=torch.uint8)
    experts[:, 0, 0] = torch.tensor([4, 5])
    ones = torch.full((2, 1, 1), 127, dtype=torch.uint8)
    y.append(mxfp4_moe(row(1.0), experts, ones, torch.tensor([[1, 0]])).flatten())
    y.append(fp8_linear(row(1.0, 2.0), row(1.0, -2.0).to(E4M3), torch.tensor([2.0])).flatten())
    x = torch.cat((row(1.0), row(2.0)))[None]
    scales = torch.tensor([3.0, 5.0]).view(2, 1, 1)
    y.append(grouped_fp8_linear(x, row(1.0).expand(2, 1, 32).to(E4M3), scales).flatten())
    scales = torch.tensor([2.0]).view(1, 1, 1)
    y.append(grouped_fp8_linear(row(1.0, 2.0)[None], row(1.0, -2.0)[None].to(E4M3), scales)[0, 0])
    parts, out = torch.zeros(3, PART.value), torch.full((2,), torch.nan).bfloat16()
    parts[:, :2] = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    start(
        combine_kernel, 4, out.device, (1, 1), (parts, out, 2, 3), EARLY=False, TARGET="interpret"
    )
    return [values.tolist() for values in (*y, out)]


def test_examples(interpreter):
    assert interpreter.alone(examples) == [
        [-2.0], [3.0, 2.0], [-6.0], [3.0, 10.0], [-6.0], [9.0, 12.0],
    ]  # fmt: skip


@pytest.mark.parametrize("slabs", [1, 2, 3, 5, 23, 182])
@pytest.mark.parametrize("tiles", [1, 7, 40, 264, 265, 1000])
def test_splits_cover_k_and_none_is_empty(tiles, slabs):
    each, splits = split_of(tiles, slabs, 264)
    assert each * (splits - 1) < slabs <= each * splits
    assert splits == 1 or (tiles * splits <= 264 and each >= 2)


def test_a_tile_is_of_powers_of_two():
    with pytest.raises(AssertionError, match="n is 96, no power of two"):
        Tile(n=96, m=16, slab=128, warps=4, stages=2)
