"""The kernels across processes, in Triton's interpreter, against numpy, bit by bit.

Many calls in one launch, ranks late at random: every kernel, dtype and op; launches of different
kernels and grids one after another, with the counters starting before a wrap.
"""

import random

import numpy as np
import pytest
import torch

from tests.kernels.interpreted import (
    KERNELS,
    Interpreted,
    late,
    layout_of,
    start_sum,
)
from tests.kernels.sums import COMBINE, Guarded, held, inputs, ops_of, reduced
from tests.ranks.reference import FLOATS
from tp3.comm.layout import MAX_BLOCKS

DTYPES = [*FLOATS, torch.int64, torch.int32, torch.uint8]
VECTORS = [1, 63, 64, 65, 100, 3]  # 16 bytes each; a tile has 64
CALLS = {2: 50, 3: 45, 5: 8}
MIXED = [(torch.bfloat16, "SUM"), (torch.float32, "SUM"), (torch.float16, "AVG")]
STARTS = {2: 2**31 - 30, 3: 2**32 - 30, 5: 0}


def check_sum(transport, kernel, dtype, op, vectors, *, in_place, salt=0):
    """One call on data that all ranks can compute. Errors: AssertionError with the coordinate."""
    rank, world_size = transport.rank, transport.world_size
    numel = vectors * 16 // dtype.itemsize
    scatter = kernel == "reduce-scatter"
    arrays = inputs(dtype, op, world_size, numel * (world_size if scatter else 1), salt)
    want = held(reduced(dtype, op, arrays), dtype)
    x = Guarded.holding(held(arrays[rank], dtype))
    out = x if in_place and not scatter else Guarded(numel, dtype)
    if scatter:
        want = want[rank * numel : (rank + 1) * numel]
    start_sum(transport, kernel, x.view, out.view, op)
    label = f"{kernel} {dtype} {op} {vectors} vectors, call {salt}, rank {rank} of {world_size}"
    assert not transport.page[1], f"{label}: the kernel reported {transport.page[:16]}"
    out.check(label, want)
    if out is not x:
        x.check(f"{label}, input", held(arrays[rank], dtype))


def kernels_of(dtype, op):
    """Sums on all kernels; the other ops, which only the folding knows, on one each in turn."""
    able = KERNELS[dtype not in FLOATS :]
    return able if op in ("SUM", "AVG") else [able[list(COMBINE).index(op) % len(able)]]


def every_dtype_and_op(rank, world_size, layout, folder):
    transport = Interpreted(folder, rank, layout)
    chance, number = random.Random(rank), 0
    for dtype in DTYPES:
        for op in ops_of(dtype):
            for kernel in kernels_of(dtype, op):
                late(chance, 0.01)
                vectors = VECTORS[number % len(VECTORS)]
                check_sum(transport, kernel, dtype, op, vectors,
                    in_place=number % 2 == 0, salt=number,
                )  # fmt: skip
                number += 1
    return number


def test_every_kernel_dtype_and_op(interpreter, tmp_path):
    calls = sum(len(kernels_of(dtype, op)) for dtype in DTYPES for op in ops_of(dtype))
    assert interpreter.ranks(every_dtype_and_op, layout_of(3), tmp_path) == [calls] * 3


def mixed_launches(rank, world_size, layout, folder):
    transport = Interpreted(folder, rank, layout)
    shared, chance = random.Random(world_size), random.Random(100 + rank)
    first = transport.words[layout.LAUNCHES // 4]
    for number in range(CALLS[world_size]):
        late(chance)
        transport.max_blocks = shared.choice((1, 2, 3, 4))
        kernel = shared.choice([*KERNELS, "exchange"])
        vectors = shared.choice((1, 17, 64, 130, 300, 500))
        dtype, op = shared.choice(
            MIXED if kernel == "sentinel" else [*MIXED, (torch.int32, "BXOR")]
        )
        if kernel == "exchange":
            check_gather(transport, vectors * 16 - shared.randrange(16), number)
            continue
        check_sum(
            transport, kernel, dtype, op, vectors, in_place=chance.random() < 0.5, salt=number
        )
    copies = transport.words[layout.LAUNCHES // 4 :][:MAX_BLOCKS]
    assert (copies == copies[0]).all()
    return int(np.uint32(copies[0]) - np.uint32(first))


def check_gather(transport, num_bytes, salt):
    rank, world_size = transport.rank, transport.world_size
    rows = [pattern(r, r, num_bytes, salt) for r in range(world_size)]
    data, out = Guarded.holding(rows[rank]), Guarded(world_size * num_bytes, torch.uint8)
    transport.kernels.exchange(
        transport,
        sources=transport.kernels.Strided(data.view.data_ptr()),
        targets=transport.kernels.Strided(out.view.data_ptr(), num_bytes),
        num_bytes=num_bytes,
        lanes=(0, 2 * world_size),
    )
    assert not transport.page[1], f"call {salt}: the kernel reported {transport.page[:16]}"
    out.check(f"gather of {num_bytes} bytes, call {salt}", torch.cat(rows))


def pattern(sender, receiver, num_bytes, salt=0):
    rng = np.random.default_rng([salt, sender, receiver])
    return torch.from_numpy(rng.integers(0, 256, num_bytes, np.uint8))


@pytest.mark.parametrize("world_size", CALLS, ids=lambda w: f"W{w}-from-{STARTS[w]}")
def test_launches_of_different_grids_with_late_ranks(interpreter, world_size, tmp_path):
    rounds = interpreter.ranks(
        mixed_launches, layout_of(world_size), tmp_path, start=STARTS[world_size]
    )
    assert len(set(rounds)) == 1
    assert rounds[0] > 30 or not STARTS[world_size], "the counters were to wrap"
