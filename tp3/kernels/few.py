"""What the products for up to 8 rows of bf16 x share: ``mxfp4_few`` and ``fp8_few``.

Weights, scales and x go from global memory straight to where the tensor cores take them from: no
shared memory and no barrier before the end. Each warp of a block has 128 other columns of a slab (a
batch of products), and the warps' parts are added once. The next slab is on its way meanwhile.

The order of k within a slab is chosen so that a thread multiplies what it has loaded; in another
the results would be the same, and slower. So they are with Triton 3.9, which sends the decoded
weights through shared memory whatever the order.
"""

import torch
import triton

from tp3.kernels.launch import INTERPRETED
from tp3.kernels.operands import multiplies_pairs
from tp3.kernels.tiles import Tile, Tiles

WARPS = 4
COLUMNS = 128  # of a slab, to a warp
# Four blocks of its registers fit on a multiprocessor of an H200.
TILES = Tiles(
    nvidia={8: Tile(n=32, m=8, slab=COLUMNS * WARPS, warps=WARPS, stages=1)}, amd={}, blocks=528
)
# Whether decoded weights stay in registers. Read in 3.6 and 3.9, not in those between.
STRAIGHT = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)


def serves(x: torch.Tensor) -> bool:
    """Whether these kernels are the ones for x, rows first."""
    able = INTERPRETED or (STRAIGHT and multiplies_pairs(x.device))
    return able and x.dtype == torch.bfloat16 and x.shape[0] <= max(TILES.nvidia)
