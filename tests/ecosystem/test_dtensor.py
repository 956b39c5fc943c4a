"""DTensor, tensor-parallel plans and loss_parallel against plain tensors."""

import itertools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

REDUCTIONS = {
    "sum": lambda parts: parts.sum(0),
    "avg": lambda parts: parts.mean(0),
    "max": lambda parts: parts.amax(0),
    "min": lambda parts: parts.amin(0),
}


def line(world_size: int) -> DeviceMesh:
    return init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))


def ints(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(-9, 10, shape, generator=torch.Generator().manual_seed(seed)).float()


def shard_of(full: Tensor, dim: int, rank: int, world_size: int) -> Tensor:
    chunks = list(full.chunk(world_size, dim))
    empty = full.narrow(dim, 0, 0)
    return (chunks + [empty] * world_size)[rank]


def placements_of(rank: int, world_size: int) -> None:
    mesh = line(world_size)
    for shape in ((7, 5), (7, 2), (1, 8)):
        full = ints(*shape)
        for source, target in itertools.product((Shard(0), Shard(1), Replicate()), repeat=2):
            start = full if rank == 0 else torch.full_like(full, float("nan"))
            there = distribute_tensor(start, mesh, [source]).redistribute(placements=[target])
            dim = getattr(target, "dim", None)
            want = full if dim is None else shard_of(full, dim, rank, world_size)
            assert torch.equal(there.to_local(), want), (shape, source, target, rank)
            assert torch.equal(there.full_tensor(), full), (shape, source, target)
        parts = torch.stack([ints(*shape, seed=r + 1) for r in range(world_size)])
        for name, reduction in REDUCTIONS.items():
            for target in (Shard(0), Shard(1), Replicate()):
                there = DTensor.from_local(parts[rank], mesh, [Partial(name)])
                got = there.redistribute(placements=[target]).full_tensor()
                torch.testing.assert_close(got, reduction(parts), rtol=1e-6, atol=0)


def operators(rank: int, world_size: int) -> None:
    mesh = line(world_size)
    a, b = ints(7, 5), ints(5, 4, seed=1)
    choices: list[Placement] = [Shard(0), Shard(1), Replicate()]
    for left, right in itertools.product(choices, repeat=2):
        x = distribute_tensor(a, mesh, [left]).requires_grad_()
        y = distribute_tensor(b, mesh, [right]).requires_grad_()
        product = x @ y
        assert torch.equal(product.full_tensor(), a @ b), (left, right)
        product.sum().backward()
        assert torch.equal(x.grad.full_tensor(), torch.ones(7, 4) @ b.T), (left, right)
        assert torch.equal(y.grad.full_tensor(), a.T @ torch.ones(7, 4)), (left, right)
        assert torch.equal(x.sum(0).full_tensor(), a.sum(0))
        torch.testing.assert_close(x.softmax(0).full_tensor(), a.softmax(0))


def two_dimensions(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    assert list(mesh.get_coordinate()) == [rank // 2, rank % 2]
    for name, members in (("dp", [rank % 2, rank % 2 + 2]), ("tp", [rank & 2, rank | 1])):
        group = mesh[name].get_group()
        assert dist.get_process_group_ranks(group) == members
        total = torch.tensor([float(rank)])
        dist.all_reduce(total, group=group)
        assert total.item() == sum(members)
    full = ints(7, 5)
    choices = [Shard(0), Shard(1), Replicate()]
    for source in itertools.product(choices, repeat=2):
        for target in itertools.product(choices, repeat=2):
            there = distribute_tensor(full, mesh, source).redistribute(placements=target)
            assert torch.equal(there.full_tensor(), full), (source, target)
    x = distribute_tensor(full, mesh, [Shard(0), Replicate()])
    w = distribute_tensor(ints(5, 4), mesh, [Replicate(), Shard(1)])
    assert torch.equal((x @ w).full_tensor(), full @ ints(5, 4))
    check_parallel(Mlp(), Mlp(), MLP_PLAN, mesh["tp"], ints(2, 6, 12) / 9)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.up, self.down = nn.Linear(12, 20), nn.Linear(20, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Attention(nn.Module):
    def __init__(self, heads: int = 6) -> None:
        super().__init__()
        torch.manual_seed(12)
        self.head_dim = 12 // heads
        self.q, self.k, self.v, self.o = (nn.Linear(12, 12) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(12), Attention()
        self.norm2, self.mlp = nn.LayerNorm(12), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(self.norm2(x))


# Width 20 leaves shards of 7, 7 and 6, which only a DTensor between the two layers can express.
MLP_PLAN = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
ATTENTION_PLAN = {name: ColwiseParallel() for name in "qkv"} | {"o": RowwiseParallel()}
GATHER = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
SCATTER = {"output_layouts": Shard(1), "use_local_output": False}
SEQUENCE_PLAN = {
    "norm": SequenceParallel(),
    "attention": PrepareModuleInput(**GATHER),
    "attention.o": RowwiseParallel(**SCATTER),
    "norm2": SequenceParallel(),
    "mlp": PrepareModuleInput(**GATHER),
    "mlp.down": RowwiseParallel(**SCATTER),
    "mlp.up": ColwiseParallel(use_local_output=False),
} | {f"attention.{name}": ColwiseParallel() for name in "qkv"}


def check_parallel(
    model: nn.Module, plain: nn.Module, plan: dict, mesh: DeviceMesh, x: Tensor
) -> None:
    """Same outputs, same input gradient, same parameter gradients as the unsharded module."""
    parallelize_module(model, mesh, plan)
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    sequence = plan is SEQUENCE_PLAN
    given = distribute_tensor(mine, mesh, [Shard(1)]) if sequence else mine
    got, want = model(given), plain(theirs)
    got = got.full_tensor() if isinstance(got, DTensor) else got
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    got.square().sum().backward()
    want.square().sum().backward()
    if not sequence:
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-4)
    for (name, p), w in zip(model.named_parameters(), plain.parameters(), strict=True):
        grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        report = f"{name}: {{}}".format
        torch.testing.assert_close(grad, w.grad, rtol=1e-4, atol=1e-4, msg=report)


def parallel_plans(rank: int, world_size: int) -> None:
    mesh = line(world_size)
    x = ints(2, 6, 12) / 9
    check_parallel(Mlp(), Mlp(), MLP_PLAN, mesh, x)
    check_parallel(Attention(), Attention(), ATTENTION_PLAN, mesh, x)
    check_parallel(Block(), Block(), SEQUENCE_PLAN, mesh, x)
    torch.manual_seed(4 + rank)
    copies = distribute_module(nn.Linear(3, 3), mesh)
    torch.manual_seed(4)
    assert torch.equal(copies.weight.full_tensor(), nn.Linear(3, 3).weight)


def parallel_loss(rank: int, world_size: int) -> None:
    mesh = line(world_size)
    for vocabulary in (9, 10):
        logits, labels = ints(8, vocabulary) / 3, torch.arange(8) % vocabulary
        labels[3] = -100
        plain = logits.clone().requires_grad_()
        want = F.cross_entropy(plain, labels)
        want.backward()
        split = distribute_tensor(logits, mesh, [Shard(1)]).requires_grad_()
        with loss_parallel():
            loss = F.cross_entropy(split, labels)
            loss.backward()
        torch.testing.assert_close(loss.full_tensor(), want)
        torch.testing.assert_close(split.grad.full_tensor(), plain.grad)


def test_every_placement_to_every_other(ranks):
    ranks(placements_of)


def test_operators_on_sharded_tensors(ranks):
    ranks(operators)


def test_two_dimensional_mesh(ranks):
    ranks(two_dimensions, world_size=4)


def test_parallelize_module(ranks):
    ranks(parallel_plans)


def test_loss_parallel(ranks):
    ranks(parallel_loss)
