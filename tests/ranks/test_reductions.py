"""all_reduce, reduce and reduce_scatter against integers computed in numpy."""

import itertools

import numpy as np
import torch
import torch.distributed as dist

from tests.ranks.reference import (
    COMPLEX,
    FP8,
    LAYOUTS,
    OPS,
    SIZES,
    SUMMED,
    Op,
    Placed,
    call,
    everyone,
    lacks,
    ops_of,
    poisoned,
    raises,
    reduced,
    same,
    tensor,
)

CASES = [(dtype, op) for dtype in [*SUMMED, torch.bool] for op in ops_of(dtype)]


def supported(collective):
    return [(dtype, op) for dtype, op in CASES if not lacks(collective, op, dtype)]


def all_reduce_of_every_dtype_and_op(rank, world_size):
    for (dtype, op), async_op in itertools.product(supported("all_reduce"), (False, True)):
        inputs = everyone(world_size, (3, 7), dtype, op=op)
        mine = tensor(inputs[rank], dtype)
        call(async_op, dist.all_reduce, mine, op=OPS[op])
        same(f"all_reduce {op} {dtype} async={async_op}", mine, reduced(op, inputs))


def test_all_reduce_of_every_dtype_and_op(ranks):
    ranks(all_reduce_of_every_dtype_and_op)


def all_reduce_of_every_layout(rank, world_size):
    layouts = [layout for layout in LAYOUTS if not lacks("layout", layout)]
    for layout, dtype, size in itertools.product(layouts, (torch.float32, torch.bfloat16), SIZES):
        inputs = everyone(world_size, (size, 2), dtype)
        mine = Placed(inputs[rank], dtype, layout)
        dist.all_reduce(mine.view)
        mine.check(f"all_reduce {dtype} {layout} ({size}, 2)", reduced("sum", inputs))


def test_all_reduce_of_every_layout_and_size(ranks):
    ranks(all_reduce_of_every_layout)


def all_reduce_of_scalars_and_large(rank, world_size):
    for shape, dtype in itertools.product([(), (1 << 20) + 1], (torch.float32, torch.float16)):
        inputs = everyone(world_size, shape, dtype)
        mine = tensor(inputs[rank], dtype)
        dist.all_reduce(mine)
        same(f"all_reduce {dtype} {shape}", mine, reduced("sum", inputs))


def test_all_reduce_of_scalars_and_large(ranks):
    ranks(all_reduce_of_scalars_and_large)


def all_reduce_wraps_integers(rank, world_size):
    dtypes = [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64]
    for dtype in (each for each in dtypes if not lacks("all_reduce", each.__name__)):
        info = np.iinfo(dtype)
        rng = np.random.default_rng(5)
        inputs = rng.integers(info.min, info.max, (world_size, 1000), dtype, endpoint=True)
        for name, combined in [
            ("sum", np.add.reduce(inputs, dtype=dtype)),
            ("product", np.multiply.reduce(inputs, dtype=dtype)),
        ]:
            mine = torch.from_numpy(inputs[rank].copy())
            dist.all_reduce(mine, op=OPS[name])
            same(f"wrapping {name} of {dtype.__name__}", mine, torch.from_numpy(combined))


def test_all_reduce_wraps_integers(ranks):
    ranks(all_reduce_wraps_integers)


def all_reduce_propagates_non_finite(rank, world_size):
    nan, inf = float("nan"), float("inf")
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        mine = torch.full((6,), float(rank), dtype=dtype)
        if rank == world_size - 1:
            mine[:3] = torch.tensor([nan, inf, -inf])
        if rank == 0:
            mine[3:5] = torch.tensor([nan, inf])
        dist.all_reduce(mine)
        total = float(sum(range(world_size)))
        assert str(mine.tolist()) == str([nan, inf, -inf, nan, inf, total]), (dtype, mine)
        for op, ends in ((Op.MIN, [-inf, -1.0]), (Op.MAX, [inf, float(world_size)])):
            mine = torch.tensor([ends[0] if rank == 0 else 1.0, ends[1] if rank else 0.5])
            mine = mine.to(dtype)
            dist.all_reduce(mine, op=op)
            assert mine.tolist() == ends, (dtype, op, mine)


def test_all_reduce_propagates_nan_and_infinity(ranks):
    ranks(all_reduce_propagates_non_finite)


def premul_sum(rank, world_size):
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        inputs = everyone(world_size, 33, dtype)
        for factor in (2.0, 0.5, torch.tensor([4.0], dtype=dtype)):
            mine = tensor(inputs[rank], dtype)
            dist.all_reduce(mine, op=dist._make_nccl_premul_sum(factor))
            want = reduced("sum", [array * float(factor) for array in inputs])
            same(f"premul_sum {factor} {dtype}", mine, want)


def test_premul_sum(ranks):
    if not lacks("all_reduce", "premul_sum"):
        ranks(premul_sum)


def reduce_to_every_rank(rank, world_size):
    cases = itertools.product(supported("reduce"), range(world_size))
    for number, ((dtype, op), dst) in enumerate(cases):
        inputs = everyone(world_size, 19, dtype, op=op)
        mine = Placed(inputs[rank], dtype, LAYOUTS[0] if lacks("layout") else LAYOUTS[number % 3])
        call(bool(number % 2), dist.reduce, mine.view, dst=dst, op=OPS[op])
        if rank == dst:
            mine.check(f"reduce {op} {dtype} to {dst}", reduced(op, inputs))


def test_reduce_to_every_rank(ranks):
    ranks(reduce_to_every_rank)


def reduce_scatter(rank, world_size):
    cases = itertools.product(supported("reduce_scatter"), (False, True), (0, 5, 1031))
    for (dtype, op), async_op, size in cases:
        inputs = everyone(world_size, (world_size, size), dtype, op=op)
        want = reduced(op, inputs)[rank]
        label = f"{op} {dtype} of {size} async={async_op}"
        mine = tensor(inputs[rank], dtype)
        out = poisoned(size, dtype)
        call(async_op, dist.reduce_scatter, out, list(mine), op=OPS[op])
        same(f"reduce_scatter {label}", out, want)
        for name, form in (("stacked", mine), ("concatenated", mine.view(-1))):
            if lacks("reduce_scatter_tensor", name):
                continue
            out = poisoned(size, dtype)
            call(async_op, dist.reduce_scatter_tensor, out, form, op=OPS[op])
            same(f"reduce_scatter_tensor {name} {label}", out, want)
        same(f"input of reduce_scatter {label}", mine, inputs[rank])


def test_reduce_scatter(ranks):
    ranks(reduce_scatter)


def reduce_scatter_uneven_and_strided(rank, world_size):
    sizes = [2 * r for r in range(world_size)]
    inputs = [[np.full(n, r + 10 * j) for j, n in enumerate(sizes)] for r in range(world_size)]
    parts = [Placed(array, torch.float32, "strided") for array in inputs[rank]]
    out = Placed(np.zeros(sizes[rank]), torch.float32, "offset")
    dist.reduce_scatter(out.view, [part.view for part in parts])
    out.check("uneven reduce_scatter", reduced("sum", [r[rank] for r in inputs]))


def test_reduce_scatter_uneven_and_strided(ranks):
    if not lacks("reduce_scatter", "uneven"):
        ranks(reduce_scatter_uneven_and_strided)


def coalesced(rank, world_size):
    shapes = [(3,), (0,), (65, 2), (1,)]
    inputs = [everyone(world_size, shape, torch.float32, salt=i) for i, shape in enumerate(shapes)]
    wants = [reduced("sum", arrays) for arrays in inputs]
    forms = ["manager", "async manager", "all_reduce_coalesced", "async coalesced"]
    if not lacks("reduce_scatter", "coalesced"):
        forms += ["device manager", "async device manager"]
    for form in forms:
        mine = [tensor(arrays[rank], torch.float32) for arrays in inputs]
        if form.endswith("manager"):
            device = mine[0].device if "device" in form else None
            with dist._coalescing_manager(
                device=device, async_ops=form.startswith("async")
            ) as manager:
                for each in mine:
                    dist.all_reduce(each)
            if form.startswith("async"):
                manager.wait()
        else:
            future = dist.all_reduce_coalesced(mine, async_op=form.startswith("async"))
            if future:
                future.wait()
        for got, want in zip(mine, wants):
            same(f"all_reduce in {form}", got, want)
    if lacks("reduce_scatter", "coalesced"):
        return
    inputs = everyone(world_size, (2, world_size, 9), torch.float32)
    outs = [poisoned(9, torch.float32) for _ in range(2)]
    with dist._coalescing_manager():
        for out, array in zip(outs, inputs[rank]):
            dist.reduce_scatter_tensor(out, tensor(array, torch.float32))
    for out, want in zip(outs, reduced("sum", inputs)):
        same("reduce_scatter_tensor in manager", out, want[rank])


def test_coalesced(ranks):
    ranks(coalesced)


def refused(rank, world_size):
    errors = (ValueError, RuntimeError, TypeError)
    mine = torch.ones(4)
    for op in (Op.BAND, Op.BOR, Op.BXOR):
        raises(errors, dist.all_reduce, mine, op=op)
    for dtype, op in itertools.product(COMPLEX, (Op.MIN, Op.MAX, Op.PRODUCT)):
        if not (op == Op.PRODUCT and lacks("refusal", "complex product")):
            raises(errors, dist.all_reduce, mine.to(dtype), op=op)
    for dtype in FP8:
        raises(errors, dist.all_reduce, mine.to(dtype))
    raises(errors, dist.all_reduce, mine.to_sparse(), op=Op.MAX)
    raises(errors, dist.reduce_scatter_tensor, torch.ones(4), torch.ones(4 * world_size + 1))
    dist.all_reduce(mine)
    same("all_reduce after refusals", mine, np.full(4, world_size))


def test_bad_input_is_refused_and_the_group_goes_on(ranks):
    ranks(refused)
