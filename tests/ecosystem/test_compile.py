"""torch.compile through collectives: one graph, and the values of plain arithmetic."""

import copy
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch._dynamo.backends.debugging  # these two once here, not once in every rank
import torch._inductor.compile_fx
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list

UNEVEN = torch.tensor([[1, 0, 2], [3, 1, 0], [0, 2, 2]])  # UNEVEN[i, j] rows go from i to j


def value(rank: int, rows: int = 6, columns: int = 4) -> Tensor:
    start = 100.0 * rank
    return torch.arange(start, start + rows * columns).reshape(rows, columns)


def all_values(world_size: int, **shape: int) -> Tensor:
    return torch.stack([value(r, **shape) for r in range(world_size)])


def reduced(x: Tensor) -> Tensor:
    return funcol.all_reduce(x * 2, "sum", dist.group.WORLD) + 1


def largest(x: Tensor) -> Tensor:
    return funcol.all_reduce(x, "max", dist.group.WORLD)


def gathered(x: Tensor) -> Tensor:
    return funcol.all_gather_tensor(x + 1, 0, dist.group.WORLD) * 2


def gathered_columns(x: Tensor) -> Tensor:
    return funcol.all_gather_tensor(x + 1, 1, dist.group.WORLD) * 2


def scattered(x: Tensor) -> Tensor:
    return funcol.reduce_scatter_tensor(x * 2, "sum", 0, dist.group.WORLD) + 1


def exchanged(x: Tensor) -> Tensor:
    return funcol.all_to_all_single(x + 1, None, None, dist.group.WORLD) * 2


def exchanged_uneven(x: Tensor, sends: list[int], receives: list[int]) -> Tensor:
    return funcol.all_to_all_single(x + 1, receives, sends, dist.group.WORLD) * 2


def broadcast(x: Tensor) -> Tensor:
    return funcol.broadcast(x * 2, 1, dist.group.WORLD) + 1


def in_place(x: Tensor) -> Tensor:
    y = x * 2
    dist.all_reduce(y)
    return y + 1


def in_place_gather(x: Tensor) -> Tensor:
    out = x.new_empty(x.shape[0] * dist.get_world_size(), x.shape[1])
    dist.all_gather_into_tensor(out, x + 1)
    return out * 2


def in_place_scatter(x: Tensor) -> Tensor:
    out = x.new_empty(x.shape[0] // dist.get_world_size(), x.shape[1])
    dist.reduce_scatter_tensor(out, x * 2)
    return out + 1


def references(rank: int, world_size: int) -> dict[Callable, Tensor]:
    values = all_values(world_size)
    total = values.sum(0)
    blocks = values.unflatten(1, (world_size, -1))
    return {
        reduced: total * 2 + 1,
        largest: values[-1],
        gathered: (values.flatten(0, 1) + 1) * 2,
        gathered_columns: (torch.cat(list(values), 1) + 1) * 2,
        scattered: total.chunk(world_size)[rank] * 2 + 1,
        exchanged: (blocks[:, rank].flatten(0, 1) + 1) * 2,
        broadcast: values[1] * 2 + 1,
        in_place: total * 2 + 1,
        in_place_gather: (values.flatten(0, 1) + 1) * 2,
        in_place_scatter: total.chunk(world_size)[rank] * 2 + 1,
    }


def compiled_collectives(rank: int, world_size: int) -> None:
    for function, want in references(rank, world_size).items():
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        for _ in range(3):
            got = compiled(value(rank))
            assert torch.equal(got, want), f"{function.__name__}: {got} instead of {want}"

    sends, receives = UNEVEN[rank].tolist(), UNEVEN[:, rank].tolist()
    rows = [value(r, rows=int(UNEVEN[r].sum())).split(UNEVEN[r].tolist()) for r in range(3)]
    want = (torch.cat([row[rank] for row in rows]) + 1) * 2
    compiled = torch.compile(exchanged_uneven, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(value(rank, rows=sum(sends)), sends, receives), want)


def compiled_backward(rank: int, world_size: int) -> None:
    weight = value(rank, rows=18)

    def gather(x: Tensor) -> Tensor:
        return (funcol.all_gather_tensor_autograd(x, 0, dist.group.WORLD) * weight).sum()

    def scatter(x: Tensor) -> Tensor:
        return (
            funcol.reduce_scatter_tensor_autograd(x, "sum", 0, dist.group.WORLD) * weight[:2]
        ).sum()

    def exchange(x: Tensor) -> Tensor:
        out = funcol.all_to_all_single_autograd(x, [2, 2, 2], [2, 2, 2], dist.group.WORLD)
        return (out * weight[:6]).sum()

    weights = all_values(world_size, rows=18)
    wants = {
        gather: weights.sum(0)[6 * rank : 6 * rank + 6],
        scatter: weights[:, :2].flatten(0, 1),
        exchange: weights[:, 2 * rank : 2 * rank + 2].flatten(0, 1),
    }
    for function, want in wants.items():
        x = value(rank).requires_grad_()
        torch.compile(function, backend="aot_eager", fullgraph=True)(x).backward()
        assert torch.equal(x.grad, want), f"{function.__name__}: {x.grad} instead of {want}"


def chained(x: Tensor) -> Tensor:
    """Every collective, but few kernels between them: each costs Inductor seconds of C++."""
    total = x * 2
    dist.all_reduce(total)
    block = funcol.reduce_scatter_tensor(total, "sum", 0, dist.group.WORLD)
    spread = funcol.all_gather_tensor(block, 0, dist.group.WORLD)
    swapped = funcol.all_to_all_single(spread, None, None, dist.group.WORLD)
    return torch.relu(funcol.all_reduce(swapped, "sum", dist.group.WORLD) - total)


def compiled_by_inductor(rank: int, world_size: int) -> None:
    total = all_values(world_size).sum(0) * 2
    blocks = [b * world_size for b in total.chunk(world_size)]  # all ranks hold the same total
    swapped = sum(torch.cat([blocks[r]] * world_size) for r in range(world_size))
    want = torch.relu(swapped - total)
    cheap = {"compile_threads": 1, "cpp.vec_isa_ok": False, "cpp_cache_precompile_headers": False}
    with torch._inductor.config.patch(cheap):
        compiled = torch.compile(chained, backend="inductor", fullgraph=True)
        for _ in range(3):
            got = compiled(value(rank))
            assert torch.equal(got, want), f"{got} instead of {want}"


def test_aot_eager(ranks):
    ranks(compiled_collectives)


def test_aot_eager_backward(ranks):
    ranks(compiled_backward)


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
def test_inductor(ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # one compilation for all ranks
    ranks(compiled_by_inductor)


def compiled_ddp(rank: int, world_size: int) -> None:
    """DDP's reducer calls the group from C++ while Dynamo evaluates frames."""
    torch._dynamo.reset()
    torch.manual_seed(3)
    plain = torch.nn.Linear(10, 10)
    model = torch.nn.parallel.DistributedDataParallel(copy.deepcopy(plain))
    compiled = torch.compile(model, backend="aot_eager")
    x = torch.full((4, 10), rank + 1.0)
    for _ in range(3):
        model.zero_grad()
        compiled(x).square().sum().backward()
    inputs = [torch.full((4, 10), r + 1.0) for r in range(world_size)]
    (sum(plain(x).square().sum() for x in inputs) / world_size).backward()
    for got, want in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad)
    group = dist.group.WORLD
    if dist.get_backend() == "r4d":
        for method in (type(group).allreduce, type(group.group).submit, type(group.group).open):
            assert not _debug_get_cache_entry_list(method.__code__)


def test_ddp_is_compiled_and_its_backend_is_not(ranks):
    ranks(compiled_ddp)
