"""Functional collectives, eager, differentiated and under torch.compile."""

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as differentiable

from tests.ranks.reference import OPS, everyone, poisoned, reduced, same, tensor

F32 = torch.float32


def eager(rank, world_size):
    group = dist.group.WORLD
    inputs = everyone(world_size, (world_size * 2, 3), F32)
    mine = tensor(inputs[rank], F32)
    total = reduced("sum", inputs)
    for op in ("sum", "avg", "min", "max", "product"):
        operands = everyone(world_size, 11, F32, op=op)
        out = funcol.all_reduce(tensor(operands[rank], F32), op, group)
        same(f"all_reduce {op}", _waited(out), reduced(op, operands))
    for dim in (0, 1):
        out = funcol.all_gather_tensor(mine, dim, group)
        same(f"all_gather_tensor along {dim}", _waited(out), np.concatenate(inputs, dim))
    out = funcol.reduce_scatter_tensor(mine, "sum", 0, group)
    same("reduce_scatter_tensor", _waited(out), np.split(total, world_size)[rank])
    out = funcol.reduce_scatter_tensor(mine.t().contiguous(), "sum", 1, group)
    same("reduce_scatter_tensor along 1", _waited(out), np.split(total.T, world_size, 1)[rank])
    sizes = [r + 1 for r in range(world_size)]
    sent = torch.full((sum(sizes),), rank)
    out = funcol.all_to_all_single(sent, [rank + 1] * world_size, sizes, group)
    same("all_to_all_single", _waited(out), np.repeat(np.arange(world_size), rank + 1))
    out = funcol.broadcast(mine, world_size - 1, group)
    same("broadcast", _waited(out), inputs[world_size - 1])
    moves = [(r + 1) % world_size for r in range(world_size)]
    out = funcol.permute_tensor(mine.view(-1), moves, group)
    same("permute_tensor", _waited(out), inputs[rank - 1].reshape(-1))
    same("the input", mine, inputs[rank])


def _waited(out):
    return out + 0 if isinstance(out, funcol.AsyncCollectiveTensor) else funcol.wait_tensor(out)


def test_functional_collectives(ranks):
    ranks(eager)


def coalesced(rank, world_size):
    group = dist.group.WORLD
    inputs = [everyone(world_size, (world_size * n, 2), F32, salt=n) for n in (1, 2, 3)]
    mine = [tensor(arrays[rank], F32) for arrays in inputs]
    for out, arrays in zip(funcol.all_reduce_coalesced(mine, "sum", group), inputs):
        same("all_reduce_coalesced", _waited(out), reduced("sum", arrays))
    for out, arrays in zip(funcol.all_gather_into_tensor_coalesced(mine, group), inputs):
        same("all_gather_into_tensor_coalesced", _waited(out), np.concatenate(arrays))
    outs = funcol.reduce_scatter_tensor_coalesced(mine, "sum", [0, 0, 0], group)
    for out, arrays in zip(outs, inputs):
        want = np.split(reduced("sum", arrays), world_size)[rank]
        same("reduce_scatter_tensor_coalesced", _waited(out), want)


def test_functional_collectives_coalesced(ranks):
    ranks(coalesced)


def out_variant(rank, world_size):
    """What the code that inductor generates calls."""
    inputs = everyone(world_size, (5, 2), F32)
    out = poisoned((world_size * 5, 2), F32)
    work = torch.ops._c10d_functional.all_gather_into_tensor_out(
        tensor(inputs[rank], F32), world_size, dist.group.WORLD.group_name, out=out
    )
    same("all_gather_into_tensor_out", funcol.wait_tensor(work), np.concatenate(inputs))
    mine = tensor(inputs[rank], F32)
    name = dist.group.WORLD.group_name
    funcol.wait_tensor(torch.ops._c10d_functional.all_reduce_(mine, "sum", name))
    same("all_reduce_", mine, reduced("sum", inputs))


def test_out_variants(ranks):
    ranks(out_variant)


def gradients(rank, world_size):
    group = dist.group.WORLD
    weights = torch.arange(world_size * 3, dtype=F32)
    mine = torch.full((3,), float(rank), requires_grad=True)
    gathered = funcol.all_gather_tensor_autograd(mine, 0, group)
    (gathered * weights).sum().backward()
    want = world_size * weights.view(world_size, 3)[rank]
    same("gradient of all_gather_tensor_autograd", mine.grad, want)
    mine = torch.ones(world_size * 2, requires_grad=True)
    scattered = funcol.reduce_scatter_tensor_autograd(mine, "sum", 0, group)
    (scattered * (rank + 1)).sum().backward()
    want = np.repeat(np.arange(world_size) + 1, 2)
    same("gradient of reduce_scatter_tensor_autograd", mine.grad, want)
    mine = torch.ones(world_size, requires_grad=True)
    exchanged = funcol.all_to_all_single_autograd(mine, [1] * world_size, [1] * world_size, group)
    (exchanged * (rank + 1)).sum().backward()
    same("gradient of all_to_all_single_autograd", mine.grad, np.arange(world_size) + 1)
    mine = torch.full((4,), float(rank), requires_grad=True)
    (differentiable.all_reduce(mine) * (rank + 1)).sum().backward()
    want = np.full(4, sum(range(1, world_size + 1)))
    same("gradient of nn.functional.all_reduce", mine.grad, want)


def test_gradients(ranks):
    ranks(gradients)


def compiled(rank, world_size):
    group = dist.group.WORLD

    def traced(mine):
        total = funcol.all_reduce(mine * 2, "sum", group)
        gathered = funcol.all_gather_tensor(total + 1, 0, group)
        return funcol.reduce_scatter_tensor(gathered, "max", 0, group) - 1

    def in_place(mine):
        mine = mine + 0
        dist.all_reduce(mine, op=OPS["max"])
        out = torch.empty(world_size * mine.numel())
        dist.all_gather_into_tensor(out, mine)
        return out * 3

    inputs = everyone(world_size, 8, F32)
    mine = tensor(inputs[rank], F32)
    for function, want in (
        (traced, 2 * reduced("sum", inputs)),
        (in_place, 3 * np.tile(reduced("max", inputs), world_size)),
    ):
        torch._dynamo.reset()
        run = torch.compile(function, backend="aot_eager", fullgraph=True)
        for _ in range(2):
            same(f"compiled {function.__name__}", _waited(run(mine)), want)


def test_torch_compile(ranks):
    ranks(compiled)
