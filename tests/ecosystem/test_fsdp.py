"""FSDP2 and distributed checkpoints against training the same model in one process.

Widths 7 and 5 do not divide by three ranks, so shards are uneven and the last one may be short.
"""

import copy
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def net() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 2))


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(1000 * step + rank))


def sharded(**options) -> nn.Module:
    model = net()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **options)
    return fully_shard(model, **options)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(batch(rank, step)).float().square().sum().backward()
        optimizer.step()


def train_alone(
    world_size: int, steps: range, compute: torch.dtype = torch.float32
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Mean of every rank's gradients, each from a copy of the model in the compute dtype."""
    model = net()
    optimizer = adam(model)
    for step in steps:
        parts = []
        for r in range(world_size):
            worker = copy.deepcopy(model).to(compute)
            worker.zero_grad()
            worker(batch(r, step).to(compute)).float().square().sum().backward()
            parts.append([p.grad.float() for p in worker.parameters()])
        for p, *column in zip(model.parameters(), *parts):
            p.grad = torch.stack(column).mean(0)
        optimizer.step()
    return model, optimizer


def check(model: nn.Module, want: nn.Module, rtol: float = 1e-5) -> None:
    for (name, p), w in zip(model.named_parameters(), want.parameters(), strict=True):
        full = p.full_tensor() if isinstance(p, DTensor) else p
        torch.testing.assert_close(full, w, rtol=rtol, atol=rtol, msg=f"{name}: {{}}".format)


def two_steps(rank: int, world_size: int) -> None:
    want, _ = train_alone(world_size, range(2))
    for options in ({}, {"reshard_after_forward": False}):
        model = sharded(**options)
        assert isinstance(model, FSDPModule)
        shards = [p.to_local().shape[0] for p in model.parameters()]
        assert shards == [[3, 3, 2, 2, 1, 1], [3, 3, 2, 2, 1, 1], [1, 1, 1, 1, 0, 0]][rank]
        train(model, adam(model), rank, range(2))
        check(model, want)


def accumulation(rank: int, world_size: int) -> None:
    model = sharded()
    model.set_requires_gradient_sync(False)
    model(batch(rank, 0)).square().sum().backward()
    model.set_requires_gradient_sync(True)
    model(batch(rank, 1)).square().sum().backward()
    plain = net()
    for r in range(world_size):
        for step in range(2):
            plain(batch(r, step)).square().sum().backward()
    for got, want in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got.grad.full_tensor(), want.grad / world_size)


def mixed_precision(rank: int, world_size: int) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = sharded(mp_policy=policy)
    assert model(batch(rank, 0)).dtype is torch.bfloat16
    train(model, adam(model), rank, range(2))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    check(model, train_alone(world_size, range(2), torch.bfloat16)[0])

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    model = sharded(mp_policy=policy)
    model(batch(rank, 0)).float().square().sum().backward()
    parts = []
    for r in range(world_size):
        worker = net().bfloat16()
        worker(batch(r, 0).bfloat16()).float().square().sum().backward()
        parts.append([p.grad.float() for p in worker.parameters()])
    for p, *column in zip(model.parameters(), *parts):
        want = torch.stack(column).mean(0)
        torch.testing.assert_close(p.grad.full_tensor(), want, rtol=2e-2, atol=2e-2)


def full_state_dict(rank: int, world_size: int) -> None:
    model = sharded()
    train(model, adam(model), rank, range(2))
    full = get_model_state_dict(model, options=FULL)
    want = train_alone(world_size, range(2))[0].state_dict()
    assert list(full) == (list(want) if rank == 0 else [])
    for name in full:
        torch.testing.assert_close(full[name], want[name], rtol=1e-5, atol=1e-5)

    fresh = sharded()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(fresh, full, options=options)
    for got, saved in zip(fresh.parameters(), model.parameters(), strict=True):
        assert torch.equal(got.full_tensor(), saved.full_tensor())


def checkpoint(rank: int, world_size: int, folder: str, asynchronous: bool) -> None:
    model = sharded()
    optimizer = adam(model)
    train(model, optimizer, rank, range(2))
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    if asynchronous:
        # A group of its own: the save runs its collectives in a thread beside those of training.
        saving = dcp.async_save(state, checkpoint_id=folder, process_group=dist.new_group())
        train(model, optimizer, rank, range(2, 4))
        saving.result()
    else:
        dcp.save(state, checkpoint_id=folder)
    dist.barrier()

    model = sharded()
    optimizer = adam(model)
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    check(model, train_alone(world_size, range(2))[0])
    train(model, optimizer, rank, range(2, 3))
    check(model, train_alone(world_size, range(3))[0])


def test_two_steps_of_training(ranks):
    ranks(two_steps)


def test_gradient_accumulation(ranks):
    ranks(accumulation)


def test_mixed_precision_policy(ranks):
    ranks(mixed_precision)


def test_full_state_dict_gathers_and_loads(ranks):
    ranks(full_state_dict)


def test_checkpoint_round_trip(ranks, tmp_path: Path):
    ranks(checkpoint, str(tmp_path), False)
    assert (tmp_path / ".metadata").exists()
    assert len(list(tmp_path.glob("*.distcp"))) == 3


def test_asynchronous_checkpoint_holds_the_state_at_the_call(ranks, tmp_path: Path):
    ranks(checkpoint, str(tmp_path), True)
