"""y[g] = x[g] W[g]^T for a few groups at once, W in e4m3 with scales of 128 x 128.

As in an attention's grouped output projection: 2 to 8 groups, 1 to 64 rows. One launch of
``fp8_linear``'s kernel (for up to 8 rows ``fp8_few``'s), whose blocks take the tiles of all groups,
so that few rows still fill a GPU. Contract, symbols and limits are those of ``fp8_linear``.
"""

import torch

from tp3.kernels import few
from tp3.kernels.fp8_linear import BLOCK, product
from tp3.kernels.operands import E4M3, check
from tp3.kernels.tiles import Tile, Tiles

# Narrower than fp8_linear's: a few groups have few rows of W.
TILES = Tiles(
    nvidia={
        16: Tile(n=64, m=16, slab=BLOCK, warps=4, stages=4),
        64: Tile(n=64, m=64, slab=BLOCK, warps=4, stages=4),
    },
    amd={
        16: Tile(n=64, m=16, slab=BLOCK, warps=4, stages=2),
        64: Tile(n=64, m=64, slab=BLOCK, warps=8, stages=2),
    },
)


def grouped_fp8_linear(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor
) -> torch.Tensor:
    """y [M, G, N] bf16.

    x: [M, G, K] bf16. weight: [G, N, K] e4m3. weight_scale: fp32 [G, ceil(N/128), ceil(K/128)].
    Errors: ValueError.

    >>> G = 2, x = [[1, 0, ...], [2, 0, ...]], W = 1.0 in column 0, scales [3], [5]: y = [[3], [10]]
    """
    check("weight", weight, (E4M3,), (None, None, None))
    groups, num_n, k = weight.shape
    check("x", x, (torch.bfloat16,), (None, groups, k))
    wanted = (groups, -(-num_n // BLOCK), -(-k // BLOCK))
    check("weight_scale", weight_scale, (torch.float32,), wanted)
    straight = few.serves(x)
    tiles = few.TILES if straight else TILES
    return product(tiles, x, weight, weight_scale, straight=straight)
