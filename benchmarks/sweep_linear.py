"""µs of ``mxfp4_linear`` and ``grouped_fp8_linear`` (1, 8 and 16 rows) with other tiles.

    python benchmarks/sweep_linear.py

The tiles in use are those of ``TILES`` in the kernels' files; ``bench_linear`` tells how it times.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from linear_timing import DEVICE, gate, measured, operands_of

from tests.kernels.linear.cases import LAUNCHERS, Case
from tp3.bench.machine import hardware, versions
from tp3.kernels import few, grouped_fp8_linear, mxfp4_linear
from tp3.kernels.tiles import Tile, Tiles


@contextmanager
def tiled(module: Any, tile: Tile, blocks: int) -> Iterator[None]:
    before, module.TILES = module.TILES, Tiles({16: tile}, {16: tile}, blocks)
    try:
        yield
    finally:
        module.TILES = before


def microseconds(module: Any, case: Case, tile: Tile, blocks: int) -> float:
    (x,), copies, rest = operands_of(case)
    with tiled(module, tile, blocks):
        calls = [lambda c=c: LAUNCHERS[case.kernel](x, *c, *rest) for c in copies]
        return measured({"tp3": calls})["tp3"][1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="small shapes, to try the script")
    tiny = parser.parse_args().tiny
    print(hardware(DEVICE), versions(DEVICE))
    print(gate(10 if tiny else 40), flush=True)
    for module, case, rows, choices in PLAN:
        if tiny:
            case, choices = replace(case, n=200, k=320), choices[:1]
        for m in rows:
            for tile, blocks in choices:
                us = microseconds(module, replace(case, m=m), tile, blocks)
                print(f"{case.kernel} {m}x{case.n}x{case.k}: {us:.1f} µs, {tile}, {blocks} blocks")


# n, slab, warps, stages; blocks
SWEEP_MXFP4 = [
    (Tile(n, 16, slab, warps, stages), blocks)
    for n, slab, warps, stages, blocks in (
        (64, 256, 4, 3, 528), (64, 256, 4, 3, 400), (64, 256, 4, 4, 528), (64, 256, 4, 2, 528),
        (64, 512, 4, 3, 264), (64, 128, 4, 4, 528), (128, 256, 8, 3, 264), (128, 256, 8, 4, 264),
        (128, 128, 4, 3, 400), (128, 128, 8, 5, 264), (64, 256, 4, 3, 264),
    )
]  # fmt: skip
SWEEP_FP8 = [
    (Tile(n, 16, 128, warps, stages), blocks)
    for n, warps, stages, blocks in (
        (64, 4, 4, 264), (64, 4, 5, 264), (64, 4, 3, 264), (64, 4, 4, 528), (64, 4, 4, 132),
        (128, 4, 5, 264), (128, 8, 4, 264),
    )
]  # fmt: skip
SWEEP_FEW = [
    (Tile(n, 8, 128 * warps, warps, 1), blocks)
    for n, warps, blocks in (
        (32, 4, 528), (32, 4, 396), (32, 4, 660), (64, 4, 264), (16, 4, 1056),
        (32, 8, 264), (16, 8, 528), (32, 16, 132),
    )
]  # fmt: skip

DOWN = Case("mxfp4_linear", 1, 5120, 5824)
VOCABULARY = Case("mxfp4_linear", 1, 82816, 5120)
GROUPED = Case("grouped_fp8_linear", 1, 1024, 4096, w="blocks", many=4)
PLAN = (
    (mxfp4_linear, DOWN, (16,), SWEEP_MXFP4),
    (mxfp4_linear, VOCABULARY, (16,), SWEEP_MXFP4),
    (grouped_fp8_linear, GROUPED, (16,), SWEEP_FP8),
    *((few, case, (1, 8), SWEEP_FEW) for case in (DOWN, VOCABULARY, GROUPED)),
)


if __name__ == "__main__":
    main()
