"""Products of every local shape of padded models, and of random ones, in the interpreter.

Sizes far above a tile are cut to a few tiles and the same odd rest. Operands end at pages that
must not be read; outputs are poisoned.
"""

import pytest

from tests.kernels.linear.cases import SPREADS, Case, judge, random_cases
from tests.kernels.linear.memory import Walls

# N of a rank: 82816 and 5824 are whole tiles of 128, and half of one more.
MXFP4 = [
    *(Case("mxfp4_linear", 3, 17, k) for k in (5824, 5888, 2912, 768, 704, 96)),
    *(Case("mxfp4_linear", m, n, 704) for m, n in ((1, 36), (4, 192), (16, 256), (17, 17))),
    *(Case("mxfp4_linear", m, n, k) for m, n, k in ((7, 1, 32), (8, 33, 160), (9, 33, 160))),
    Case("mxfp4_linear", 12, 17, 5824),
    Case("mxfp4_linear", 130, 36, 160),  # of 4096 rows
    Case("mxfp4_linear", 2, 17, 6656),  # more parts than are loaded at once
    Case("mxfp4_linear", 5, 36, 5824, x="token"),
    Case("mxfp4_linear", 65, 17, 96, x="token"),
]
# N % 16: 8726 and 4491.
FP8 = [
    *(
        Case("fp8_linear", m, n, k, x=x, w=w)
        for (m, n, k), x, w in (
            ((3, 150, 704), "bf16", "channel"),
            ((17, 139, 1456), "token", "channel"),
            ((3, 150, 1456), "blocks", "blocks"),
            ((1, 139, 2112), "bf16", "blocks"),
            ((66, 139, 208), "token", "blocks"),
            ((5, 36, 528), "blocks", "channel"),
        )
    ),
    *(Case("grouped_fp8_linear", 3, 130, 400, w="blocks", many=g) for g in (2, 3, 8)),
    # Up to 8 rows and more; K % 128 of 16, 32 and 112 in slabs of four blocks and of one.
    *(
        Case("grouped_fp8_linear", m, n, k, w="blocks", many=g)
        for (n, k), g in (((33, 16), 4), ((17, 544), 1), ((161, 1136), 2), ((36, 2048), 8))
        for m in (1, 7, 8, 9)
    ),
    Case("grouped_fp8_linear", 64, 128, 512, w="blocks", many=4),
]
# K of a rank: 704, 768 (2304/3 as well), 384.
MOE = [
    *(Case("mxfp4_moe", 5, 36, 704, many=8, spread=spread) for spread in SPREADS),
    Case("mxfp4_moe", 1, 17, 768, many=384),
    Case("mxfp4_moe", 4, 36, 96, many=8, spread="some none"),  # one by one
    Case("mxfp4_moe", 20, 40, 384, many=2, spread="one expert"),
    Case("mxfp4_moe", 4, 70, 96, x="token", many=5, spread="half empty"),
]


def judged(cases):
    walls = Walls()
    for seed, case in enumerate(cases):
        judge(case, seed=seed, place=lambda case, arguments: walled(walls, arguments))
    return len(cases)


def walled(walls, arguments):
    return [None if tensor is None else walls(tensor) for tensor in arguments]


@pytest.mark.parametrize("case", [*MXFP4, *FP8, *MOE], ids=str)
def test_local_shapes(interpreter, case):
    assert interpreter.alone(judged, [case]) == 1


@pytest.mark.parametrize("seed", range(4))
def test_random_shapes(interpreter, seed):
    assert interpreter.alone(judged, random_cases(50, seed)) == 50
