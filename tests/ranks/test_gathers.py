"""Collectives that only move data: broadcast, gather, scatter, all_gather, all_to_all, objects."""

import itertools

import numpy as np
import torch
import torch.distributed as dist

from tests.ranks.reference import (
    LAYOUTS,
    MOVED,
    SIZES,
    Placed,
    call,
    everyone,
    lacks,
    poisoned,
    raises,
    same,
    tensor,
)

F32 = torch.float32


def moved(collective):
    """(number, dtype, layout): every dtype, the layouts in turn."""
    layouts = [each for each in LAYOUTS if not lacks("layout", each)] or ["plain"]
    for number, dtype in enumerate(d for d in MOVED if not lacks(collective, d)):
        yield number, dtype, layouts[number % len(layouts)]


def zeros(size, dtype, layout):
    return Placed(np.zeros(size), dtype, layout)


def broadcast(rank, world_size):
    for (number, dtype, layout), src in itertools.product(moved("broadcast"), range(world_size)):
        inputs = everyone(world_size, (5, 3), dtype, salt=number)
        mine = Placed(inputs[rank], dtype, layout)
        call(bool(number % 2), dist.broadcast, mine.view, src=src)
        mine.check(f"broadcast {dtype} {layout} from {src}", inputs[src])
    for size in [*SIZES, (1 << 20) + 1]:
        inputs = everyone(world_size, size, F32)
        mine = tensor(inputs[rank], F32)
        dist.broadcast(mine, src=world_size - 1)
        same(f"broadcast of {size}", mine, inputs[world_size - 1])


def test_broadcast(ranks):
    ranks(broadcast)


def all_gather(rank, world_size):
    for (number, dtype, layout), async_op in itertools.product(moved("all_gather"), (False, True)):
        inputs = everyone(world_size, (4, 3), dtype, salt=number)
        label = f"{dtype} {layout} async={async_op}"
        mine = Placed(inputs[rank], dtype, layout)
        outs = [zeros((4, 3), dtype, layout) for _ in range(world_size)]
        call(async_op, dist.all_gather, [out.view for out in outs], mine.view)
        for peer, out in enumerate(outs):
            out.check(f"all_gather {label} from {peer}", inputs[peer])
        for name, shape in (("stacked", (world_size, 4, 3)), ("concatenated", (world_size * 4, 3))):
            if not lacks("all_gather_into_tensor", name):
                out = poisoned(shape, dtype)
                call(async_op, dist.all_gather_into_tensor, out, mine.view)
                want = np.stack(inputs).reshape(shape)
                same(f"all_gather_into_tensor {name} {label}", out, want)
        mine.check(f"input of all_gather {label}", inputs[rank])
    for size in [*SIZES, (1 << 18) + 1]:
        inputs = everyone(world_size, size, F32)
        out = poisoned(world_size * size, F32)
        dist.all_gather_into_tensor(out, tensor(inputs[rank], F32))
        same(f"all_gather_into_tensor of {size}", out, np.concatenate(inputs))


def test_all_gather(ranks):
    ranks(all_gather)


def all_gather_in_place(rank, world_size):
    inputs = everyone(world_size, 1000, F32)
    out = poisoned(world_size * 1000, F32)
    mine = out[rank * 1000 : (rank + 1) * 1000]
    mine.copy_(tensor(inputs[rank], F32))
    dist.all_gather_into_tensor(out, mine)
    same("all_gather_into_tensor in place", out, np.concatenate(inputs))


def test_all_gather_in_place(ranks):
    ranks(all_gather_in_place)


def all_gather_uneven(rank, world_size):
    shapes = [(r, 2) if r % 2 else (3, r + 1, 2) for r in range(world_size)]
    inputs = [np.full(shape, r + 1) for r, shape in enumerate(shapes)]
    outs = [poisoned(shape, F32) for shape in shapes]
    dist.all_gather(outs, tensor(inputs[rank], F32))
    for peer, out in enumerate(outs):
        same(f"uneven all_gather from {peer}", out, inputs[peer])


def test_all_gather_of_uneven_shapes(ranks):
    if not lacks("all_gather", "uneven"):
        ranks(all_gather_uneven)


def all_gather_coalesced(rank, world_size):
    shapes = [(3,), (5, 2), (1,)]
    inputs = [everyone(world_size, shape, F32, salt=i) for i, shape in enumerate(shapes)]
    mine = [tensor(arrays[rank], F32) for arrays in inputs]
    if not lacks("all_gather", "coalesced"):
        outs = [poisoned((world_size * shape[0], *shape[1:]), F32) for shape in shapes]
        with dist._coalescing_manager(async_ops=True) as manager:
            for out, each in zip(outs, mine):
                dist.all_gather_into_tensor(out, each)
        manager.wait()
        for out, arrays in zip(outs, inputs):
            same("all_gather_into_tensor in manager", out, np.concatenate(arrays))
    lists = [[poisoned(shape, F32) for shape in shapes] for _ in range(world_size)]
    dist.all_gather_coalesced(lists, mine)
    for peer, outs in enumerate(lists):
        for out, arrays in zip(outs, inputs):
            same(f"all_gather_coalesced from {peer}", out, arrays[peer])


def test_all_gather_coalesced(ranks):
    ranks(all_gather_coalesced)


def gather_and_scatter(rank, world_size):
    for (number, dtype, layout), root in itertools.product(moved("gather"), range(world_size)):
        inputs = everyone(world_size, (6,), dtype, salt=number)
        parts = [Placed(array, dtype, layout) for array in inputs]
        outs = [zeros(6, dtype, layout) for _ in range(world_size)]
        views = [out.view for out in outs] if rank == root else None
        call(bool(number % 2), dist.gather, parts[rank].view, views, dst=root)
        for peer, out in enumerate(outs if rank == root else []):
            out.check(f"gather {dtype} {layout} to {root} from {peer}", inputs[peer])
        out = zeros(6, dtype, layout)
        views = [part.view for part in parts] if rank == root else None
        call(bool(number % 2), dist.scatter, out.view, views, src=root)
        out.check(f"scatter {dtype} {layout} from {root}", inputs[rank])


def test_gather_and_scatter(ranks):
    ranks(gather_and_scatter)


def cells(world_size, *, sizes):
    """cells[i][j] goes from rank i to rank j and has sizes(i, j) elements."""
    return [
        [100 * i + 10 * j + np.arange(sizes(i, j)) % 7 for j in range(world_size)]
        for i in range(world_size)
    ]


SPLITS = {"even": lambda i, j: 5, "uneven": lambda i, j: i + 2 * j, "none": lambda i, j: 0}


def all_to_all(rank, world_size):
    dtypes = [F32, torch.bfloat16, torch.int64, torch.complex64]
    for (name, sizes), dtype, async_op in itertools.product(SPLITS.items(), dtypes, (False, True)):
        sent = cells(world_size, sizes=sizes)
        received = [sent[peer][rank] for peer in range(world_size)]
        label = f"{name} {dtype} async={async_op}"
        if not lacks("all_to_all", name):
            outs = [poisoned(len(part), dtype) for part in received]
            call(async_op, dist.all_to_all, outs, [tensor(part, dtype) for part in sent[rank]])
            for peer, out in enumerate(outs):
                same(f"all_to_all {label} from {peer}", out, received[peer])
        mine = tensor(np.concatenate(sent[rank]), dtype)
        out = poisoned(sum(map(len, received)), dtype)
        splits = [list(map(len, received)), list(map(len, sent[rank]))]
        call(async_op, dist.all_to_all_single, out, mine, *splits)
        same(f"all_to_all_single {label}", out, np.concatenate(received))


def test_all_to_all(ranks):
    ranks(all_to_all)


def all_to_all_single(rank, world_size):
    for number, dtype, layout in moved("all_to_all_single"):
        inputs = everyone(world_size, (world_size * 2, 3), dtype, salt=number)
        mine, out = Placed(inputs[rank], dtype, layout), zeros((world_size * 2, 3), dtype, layout)
        dist.all_to_all_single(out.view, mine.view)
        want = np.concatenate([array[2 * rank : 2 * rank + 2] for array in inputs])
        out.check(f"all_to_all_single {dtype} {layout}", want)


def test_all_to_all_single_of_every_dtype_and_layout(ranks):
    ranks(all_to_all_single)


def objects(rank, world_size):
    mine = [{"rank": r, "text": "x" * 10**r, "pair": (r, None)} for r in range(world_size)]
    outs = [None] * world_size
    dist.all_gather_object(outs, mine[rank])
    assert outs == mine
    for root in range(world_size):
        outs = [None] * world_size
        dist.gather_object(mine[rank], outs if rank == root else None, dst=root)
        assert outs == (mine if rank == root else [None] * world_size), root
        several = [mine[root], root, "three"] if rank == root else [None] * 3
        dist.broadcast_object_list(several, src=root)
        assert several == [mine[root], root, "three"], root
        one = [None]
        dist.scatter_object_list(one, mine if rank == root else None, src=root)
        assert one == [mine[rank]], root


def test_objects(ranks):
    ranks(objects)


def nothing_to_move(rank, world_size):
    def empty(*shape):
        return torch.empty(shape, dtype=F32)

    for async_op in (False, True):
        call(async_op, dist.all_reduce, empty(0))
        call(async_op, dist.broadcast, empty(3, 0), src=0)
        call(async_op, dist.reduce, empty(0), dst=0)
        call(async_op, dist.all_gather, [empty(0) for _ in range(world_size)], empty(0))
        call(async_op, dist.all_gather_into_tensor, empty(0), empty(0))
        parts = [empty(0) for _ in range(world_size)]
        call(async_op, dist.reduce_scatter, empty(0), parts)
        call(async_op, dist.reduce_scatter_tensor, empty(0), empty(0))
        call(async_op, dist.gather, empty(0), parts if rank == 0 else None, dst=0)
        call(async_op, dist.scatter, empty(0), parts if rank == 0 else None, src=0)
        call(async_op, dist.all_to_all_single, empty(0), empty(0))
    mine = torch.ones(3)
    dist.all_reduce(mine)
    same("all_reduce after empty calls", mine, np.full(3, world_size))


def test_zero_size_is_a_no_op_on_every_rank(ranks):
    if not lacks("zero size"):
        ranks(nothing_to_move)


def refused(rank, world_size):
    errors = (ValueError, RuntimeError, TypeError)
    mine, other = torch.ones(4), torch.ones(4, dtype=torch.int32)
    raises(errors, dist.all_gather, [torch.ones(4)] * (world_size + 1), mine)
    raises(errors, dist.all_gather, [other] * world_size, mine)
    raises(errors, dist.all_gather_into_tensor, torch.ones(4 * world_size + 1), mine)
    raises(errors, dist.all_to_all_single, torch.ones(world_size), torch.ones(world_size), [1], [1])
    raises(errors, dist.broadcast, mine, src=world_size)
    raises(errors, dist.broadcast, mine, src=-1)
    if rank == 0:
        raises(errors, dist.scatter, mine, [mine] * (world_size + 1), src=0)
        raises(errors, dist.gather, mine, [mine] * (world_size + 1), dst=0)
    dist.broadcast(mine, src=0)


def test_bad_input_is_refused_and_the_group_goes_on(ranks):
    ranks(refused)
