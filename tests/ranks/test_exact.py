"""The contract of a sum: rank order, accumulated in fp32 (fp64 for fp64), rounded once.

The reference is numpy and integer arithmetic. An ordinary test does not see a wrong order, so there
are three kinds of data, and `SEES` says which of them see it: those are negative controls.
"""

import functools
import hashlib

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.ranks.reference import DEVICE, FLOATS, ON_DEVICE, Placed, poisoned, same, tensor
from tp3.comm.launch import launch
from tp3.comm.reduce import Reduction

LARGE = (1 << 20) + 1
SIZES = [0, 1, 3, 17, 4097]
KINDS = ["gaussian", "spread", "cancelling"]
ALGORITHMS = ["auto", "one-shot", "two-shot", *(["sentinel"] if DEVICE != "cpu" else [])]
WORLD_SIZES = [2, 3, 4, 5, 7]
# Powers of two whose sum in another order loses the small one.
TRIPLES = {
    torch.float64: (60, -10),
    torch.float32: (20, -10),
    torch.float16: (14, -12),
    torch.bfloat16: (20, -10),
}
# Which kinds see a rotated order. In bf16 0 of 5,000,000 Gaussian values do.
SEES = {
    torch.float64: KINDS,
    torch.float32: KINDS,
    torch.float16: ["cancelling"],
    torch.bfloat16: ["cancelling"],
}


def wide(dtype):
    return np.float64 if dtype == torch.float64 else np.float32


def rounded(values, dtype):
    """To the nearest value of dtype, ties to even; the result stays in the wide type."""
    if dtype == torch.bfloat16:
        bits = values.astype(np.float32).view(np.uint32)
        kept = (bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) & np.uint32(0xFFFF_0000)
        return kept.view(np.float32).astype(values.dtype)
    if dtype == torch.float16:
        with np.errstate(over="ignore"):
            return values.astype(np.float16).astype(np.float32)
    return values


@functools.cache
def random_values(kind, dtype, rank):
    rng = np.random.default_rng([FLOATS.index(dtype), rank])
    values = rng.standard_normal(LARGE, wide(dtype))
    if kind == "spread":
        values = np.ldexp(values, rng.integers(-12, 13, LARGE, np.int8))
    return rounded(values.astype(wide(dtype)), dtype)


@functools.cache
def inputs_of(kind, dtype, world_size):
    """What each rank holds, values of dtype in its wide type."""
    if kind != "cancelling":
        return [random_values(kind, dtype, rank) for rank in range(world_size)]
    high, low = TRIPLES[dtype]
    terms = [2.0**high, -(2.0**high), 2.0**low, *(0.0 for _ in range(world_size - 3))]
    table = np.array(terms[:world_size], wide(dtype))
    shift = np.random.default_rng(world_size).integers(0, world_size, LARGE)
    return [table[(rank - shift) % world_size] for rank in range(world_size)]


def summed(arrays, dtype, *, start=0, between=None):
    """The sum in rank order from rank `start`; `between` rounds after each addition."""
    order = [*arrays[start:], *arrays[:start]]
    with np.errstate(over="ignore", invalid="ignore"):
        total = order[0]
        for array in order[1:]:
            total = total + array
            total = total if between is None else rounded(total, between)
    assert total.dtype == wide(dtype)
    return rounded(total, dtype)


@functools.cache
def expected(kind, dtype, world_size):
    return summed(inputs_of(kind, dtype, world_size), dtype)


def cases(world_size, algorithm):
    """`(kind, dtype, size)`; the large size with one kind per dtype, another for each algorithm."""
    for d, dtype in enumerate(FLOATS):
        for k, kind in enumerate(KINDS):
            for size in SIZES:
                yield kind, dtype, size
            if (d + k + ALGORITHMS.index(algorithm)) % 3 == 1:
                yield kind, dtype, LARGE


def all_sums_agree(rank, world_size, algorithm):
    digest = hashlib.blake2b()
    for number, (kind, dtype, size) in enumerate(cases(world_size, algorithm)):
        label = f"{kind} {dtype} {size} {algorithm} W{world_size} rank {rank}"
        mine = tensor(inputs_of(kind, dtype, world_size)[rank][:size], dtype)
        want = tensor(expected(kind, dtype, world_size)[:size], dtype)

        data = mine.clone()
        dist.all_reduce(data)
        same(f"all_reduce {label}", data, want)
        digest.update(data.double().cpu().numpy().tobytes())

        data, root = mine.clone(), number % world_size
        dist.reduce(data, root)
        same(f"reduce to {root} {label}", data, want if rank == root else mine)

        parts, wants = mine.tensor_split(world_size), want.tensor_split(world_size)
        out = poisoned(parts[rank].shape, dtype)
        dist.reduce_scatter(out, list(parts))
        same(f"reduce_scatter {label}", out, wants[rank])
    return digest.hexdigest()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("world_size", WORLD_SIZES, ids=lambda w: f"W{w}")
def test_all_sums_are_the_reference(world_size, algorithm):
    for dtype in FLOATS:
        for kind in KINDS:
            expected(kind, dtype, world_size)  # once here, not once in each rank
    env = {"TP3_ALLREDUCE": algorithm}
    digests = launch(all_sums_agree, world_size, algorithm, env=env, **ON_DEVICE)
    assert len(set(digests)) == 1


def every_place(rank, world_size):
    for dtype in FLOATS:
        arrays = inputs_of("cancelling", dtype, world_size)
        want = expected("cancelling", dtype, world_size)
        for size in (1, 17, 4097):
            for offset in range(16):
                base = poisoned(size + 16, dtype)
                data = base[offset : offset + size]
                data.copy_(tensor(arrays[rank][:size], dtype))
                dist.all_reduce(data)
                same(f"{dtype} {size} at offset {offset}", data, want[:size])
                assert (base.view(torch.uint8)[: offset * dtype.itemsize] == 0xA5).all()
                assert (base.view(torch.uint8)[(offset + size) * dtype.itemsize :] == 0xA5).all()
            for layout in ("strided", "transposed"):
                data = Placed(arrays[rank][: size * 4].reshape(size, 4), dtype, layout)
                dist.all_reduce(data.view)
                data.check(f"{dtype} {layout}", want[: size * 4].reshape(size, 4))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_views_at_every_element_offset_and_not_contiguous(algorithm):
    for dtype in FLOATS:
        expected("cancelling", dtype, 3)
    launch(every_place, 3, env={"TP3_ALLREDUCE": algorithm}, **ON_DEVICE)


@pytest.mark.parametrize("world_size", WORLD_SIZES[1:], ids=lambda w: f"W{w}")
@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: str(dtype)[6:])
def test_the_checker_rejects_wrong_sums(dtype, world_size):
    for kind in KINDS:
        arrays = [array[:4097] for array in inputs_of(kind, dtype, world_size)]
        want = tensor(summed(arrays, dtype), dtype)
        same("the right sum", tensor(summed(arrays, dtype, start=0), dtype), want)
        wrong = {}
        if kind != "cancelling":  # its terms are powers of two: nothing more is lost
            wrong["rounded"] = summed(arrays, dtype, between=torch.bfloat16)
        if kind in SEES[dtype]:
            for start in range(1, world_size):
                wrong[f"from {start}"] = summed(arrays, dtype, start=start)
        for label, total in wrong.items():
            with pytest.raises(AssertionError, match="differ, first at"):
                same(f"{kind} {label}", tensor(total, dtype), want)


def rotated(self, parts, out, combine=Reduction.combine):
    start = dist.get_rank()
    combine(self, [*parts[start:], *parts[:start]], out)


def rounding_between(self, parts, out):
    terms = [torch.from_numpy(part).view(self.dtype) for part in parts]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    torch.from_numpy(out).view(self.dtype).copy_(total)


def with_broken_combine(rank, world_size, broken, kind, dtype):
    Reduction.combine = broken
    rejected = []
    for size in (1001, 70_001):  # one-shot and two-shot
        data = tensor(inputs_of(kind, dtype, world_size)[rank][:size], dtype)
        dist.all_reduce(data)
        try:
            same("broken", data, expected(kind, dtype, world_size)[:size])
            rejected.append(False)
        except AssertionError:
            rejected.append(True)
    return rejected


@pytest.mark.parametrize(
    ("broken", "kind", "dtype"),
    [(rotated, kind, dtype) for dtype, kinds in SEES.items() for kind in kinds]
    + [(rounding_between, "gaussian", torch.bfloat16)],
)
def test_a_broken_combine_is_seen(broken, kind, dtype):
    expected(kind, dtype, 3)
    small, large = zip(*launch(with_broken_combine, 3, broken, kind, dtype))
    assert small == (broken is not rotated, True, True)  # from rank 0 is the right order
    assert large == (True, True, True)


def rows_in_batches(rank, world_size):
    row = tensor(inputs_of("cancelling", torch.float32, world_size)[rank][:1000], torch.float32)
    want = tensor(expected("cancelling", torch.float32, world_size)[:1000], torch.float32)
    for batch in (1, 2, 7, 8, 9, 100, 400):  # one-shot, two-shot, several pieces
        data = row.repeat(batch, 1)
        dist.all_reduce(data)
        for index in range(batch):
            same(f"row {index} of {batch}", data[index], want)


def test_a_result_does_not_depend_on_the_batch():
    """vllm#51290, vllm#50136, sglang#24629: another batch size, another order of the sum."""
    expected("cancelling", torch.float32, 3)
    launch(rows_in_batches, 3, **ON_DEVICE)
