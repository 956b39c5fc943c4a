"""How a product is cut: tiles of the output, slabs of K, and how many blocks share one tile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

LEAST_SLABS = 2  # of a split: below, filling the pipeline costs more than a second block brings


@dataclass(frozen=True)
class Tile:
    """n, m: of the output. slab: of K. stages: slabs in flight, plus one."""

    n: int
    m: int
    slab: int
    warps: int
    stages: int

    def __post_init__(self) -> None:
        for name in ("n", "m", "slab", "warps"):
            value = getattr(self, name)
            assert value.bit_count() == 1, f"{name} is {value}, no power of two"

    @property
    def constants(self) -> dict[str, int]:
        return {"BN": self.n, "BM": self.m, "SLAB": self.slab, "STAGES": self.stages}


@dataclass(frozen=True)
class Tiles:
    """Each: most rows of x → tile, in rising order; the last serves more rows too.

    blocks: K is split until there are so many, two or four for each multiprocessor of an H200. Not
    of the GPU at hand: all ranks shall add in the same order.
    """

    nvidia: Mapping[int, Tile]
    amd: Mapping[int, Tile]
    blocks: int = 264

    def of(self, target: str, num_m: int) -> Tile:
        """target: as the kernels' ``TARGET``."""
        rows = self.amd if target.startswith("gfx") else self.nvidia
        return next((tile for most, tile in rows.items() if num_m <= most), rows[max(rows)])


def split_of(tiles: int, slabs: int, blocks: int) -> tuple[int, int]:
    """How many slabs a block takes, and how many blocks share a tile.

    >>> split_of(tiles=40, slabs=23, blocks=264)
    (4, 6)
    """
    wanted = max(1, min(blocks // tiles, slabs // LEAST_SLABS))
    each = -(-slabs // wanted)
    return each, -(-slabs // each)
