"""DistributedDataParallel and its neighbours against the same arithmetic in one process.

DDP multiplies each gradient by 1/W and then sums. On a backend with a canonical order that is one
written value, so gradients must match bit for bit; on any other they must match to rounding.
"""

import copy
import functools
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel


def net() -> nn.Module:
    torch.manual_seed(7)
    layers = [nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4)]
    return nn.Sequential(*layers)


def batch(rank: int, step: int = 0, rows: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(rows, 6, generator=generator)


def gradients(model: nn.Module, *inputs: Tensor) -> list[Tensor | None]:
    model = copy.deepcopy(model)
    model.zero_grad()
    for x in inputs:
        model(x).square().sum().backward()
    return [p.grad for p in model.parameters()]


def in_rank_order(terms: Iterable[Tensor]) -> Tensor:
    terms = list(terms)
    total = functools.reduce(torch.add, (t.float() for t in terms))
    return total.to(terms[0].dtype)


def mean(per_rank: list[list[Tensor]], cast: torch.dtype = torch.float32) -> list[Tensor]:
    third = torch.tensor(1.0 / len(per_rank))
    return [in_rank_order((g * third).to(cast) for g in column) for column in zip(*per_rank)]


def check(got: Iterable[Tensor], want: Iterable[Tensor], what: str, rtol: float = 1e-5) -> None:
    for index, (g, w) in enumerate(zip(got, want, strict=True)):
        if dist.get_backend() == "r4d":
            assert torch.equal(g, w), f"{what}, parameter {index}: {(g - w).abs().max()} off"
        torch.testing.assert_close(g, w, rtol=rtol, atol=rtol / 10, msg=f"{what}: {{}}".format)


def grads_of(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters()]


def gradients_are_means(rank: int, world_size: int) -> None:
    want = mean([gradients(net(), batch(r)) for r in range(world_size)])
    twice = mean([gradients(net(), batch(r), batch(r, 1)) for r in range(world_size)])
    variants: dict[str, dict] = {
        "plain": {},
        "several buckets": {"bucket_cap_mb": 0.002},
        "bucket view": {"gradient_as_bucket_view": True},
        "static graph": {"static_graph": True},
    }
    for name, options in variants.items():
        start = net()
        if rank:
            nn.init.constant_(start[0].weight, float("nan"))
        model = DistributedDataParallel(start, **options)
        for _ in range(3):
            model.zero_grad()
            model(batch(rank)).square().sum().backward()
            check(grads_of(model), want, name)
        if name == "plain":
            model.zero_grad()
            with model.no_sync():
                model(batch(rank)).square().sum().backward()
            model(batch(rank, 1)).square().sum().backward()
            check(grads_of(model), twice, "no_sync")


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.stem = nn.Linear(6, 5)
        self.branches = nn.ModuleList(nn.Linear(5, 2) for _ in range(3))

    def forward(self, x: Tensor, branch: int) -> Tensor:
        return self.branches[branch](self.stem(x))


def unused_parameters(rank: int, world_size: int) -> None:
    model = DistributedDataParallel(Branches(), find_unused_parameters=True)
    for step in range(3):
        model.zero_grad()
        model(batch(rank, step), (rank + step) % 2).square().sum().backward()
        parts = []
        for r in range(world_size):
            plain = Branches()
            plain(batch(r, step), (r + step) % 2).square().sum().backward()
            parts.append(
                [torch.zeros_like(p) if p.grad is None else p.grad for p in plain.parameters()]
            )
        check(grads_of(model)[:-2], mean(parts)[:-2], f"step {step}")
        assert grads_of(model)[-2:] == [None, None], "nobody used the last branch"


def uneven_inputs(rank: int, world_size: int) -> None:
    counts = [2 + 2 * r for r in range(world_size)]
    for by_initial in (True, False):
        model = DistributedDataParallel(net(), bucket_cap_mb=0.002)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with Join([model], divide_by_initial_world_size=by_initial):
            for step in range(counts[rank]):
                optimizer.zero_grad()
                model(batch(rank, step)).square().sum().backward()
                optimizer.step()
        plain = net()
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
        for step in range(max(counts)):
            active = [r for r in range(world_size) if step < counts[r]]
            parts = [gradients(plain, batch(r, step)) for r in active]
            share = world_size if by_initial else len(active)
            for p, *column in zip(plain.parameters(), *parts):
                p.grad = torch.stack(column).sum(0) / share
            optimizer.step()
        for got, want in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


def bf16_hook(state: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """A name of its own: without CUDA, DDP refuses `bf16_compress_hook` by its name."""
    return default_hooks.bf16_compress_hook(state, bucket)


def compress_hooks(rank: int, world_size: int) -> None:
    hooks: dict[torch.dtype, tuple[Callable, float]] = {
        torch.float16: (default_hooks.fp16_compress_hook, 2e-3),
        torch.bfloat16: (bf16_hook, 2e-2),
    }
    for dtype, (hook, rtol) in hooks.items():
        model = DistributedDataParallel(net())
        model.register_comm_hook(dist.group.WORLD, hook)
        model(batch(rank)).square().sum().backward()
        parts = [gradients(net(), batch(r)) for r in range(world_size)]
        columns = zip(*[[g.to(dtype) / world_size for g in part] for part in parts])
        want = [in_rank_order(column).float() for column in columns]
        check(grads_of(model), want, str(dtype), rtol)


def power_sgd(rank: int, world_size: int) -> None:
    """Three ranks of two rows make gradients of matrix rank 6, which rank 6 must return whole."""
    off = {}
    for matrix_rank in (6, 1):
        model = DistributedDataParallel(net())
        state = powerSGD_hook.PowerSGDState(
            None,
            matrix_approximation_rank=matrix_rank,
            start_powerSGD_iter=2,
            min_compression_rate=1.0,
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        for step in range(5):
            model.zero_grad()
            model(batch(rank, step)).square().sum().backward()
        want = mean([gradients(net(), batch(r, 4)) for r in range(world_size)])
        errors = [(g - w).norm() / w.norm() for g, w in zip(grads_of(model), want)]
        off[matrix_rank] = max(errors).item()
        rate, _, _ = state.compression_stats()
        assert rate > 1, f"nothing was compressed at rank {matrix_rank}"
        flat = torch.cat([g.flatten() for g in grads_of(model)])
        everyone = [torch.empty_like(flat) for _ in range(world_size)]
        dist.all_gather(everyone, flat)
        assert all(torch.equal(flat, other) for other in everyone), "ranks hold other gradients"
    assert off[6] < 1e-4 < 1e-2 < off[1], off


def zero_redundancy(rank: int, world_size: int) -> None:
    for as_view in (False, True):
        model = DistributedDataParallel(net())
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.Adam, parameters_as_bucket_view=as_view, lr=0.01
        )
        plain = net()
        reference = torch.optim.Adam(plain.parameters(), lr=0.01)
        for step in range(3):
            optimizer.zero_grad()
            model(batch(rank, step)).square().sum().backward()
            optimizer.step()
            parts = [gradients(plain, batch(r, step)) for r in range(world_size)]
            for p, g in zip(plain.parameters(), mean(parts), strict=True):
                p.grad = g
            reference.step()
        check(model.parameters(), plain.parameters(), f"view {as_view}", rtol=1e-4)
        mine = sum(p.numel() for group in optimizer.optim.param_groups for p in group["params"])
        assert mine < sum(p.numel() for p in plain.parameters())
        optimizer.consolidate_state_dict(to=0)
        if rank == 0:
            got, want = optimizer.state_dict()["state"], reference.state_dict()["state"]
            for index, slot in want.items():
                torch.testing.assert_close(got[index]["exp_avg"], slot["exp_avg"])


def buffers_follow_rank_0(rank: int, world_size: int) -> None:
    torch.manual_seed(5)
    model = DistributedDataParallel(nn.BatchNorm1d(6))
    model.module.running_mean.fill_(rank)
    model(batch(rank, rows=4))
    want = 0.1 * batch(rank, rows=4).mean(0)
    torch.testing.assert_close(model.module.running_mean, want)
    model(batch(rank, rows=4))
    want = 0.9 * 0.1 * batch(0, rows=4).mean(0) + want
    torch.testing.assert_close(model.module.running_mean, want)


def test_gradients_are_the_mean_over_ranks(ranks):
    ranks(gradients_are_means)


def test_parameters_that_some_ranks_do_not_use(ranks):
    ranks(unused_parameters)


def test_join_with_uneven_inputs(ranks):
    ranks(uneven_inputs)


def test_fp16_and_bf16_hooks(ranks):
    ranks(compress_hooks)


def test_power_sgd_hook(ranks):
    ranks(power_sgd)


def test_zero_redundancy_optimizer(ranks):
    ranks(zero_redundancy)


def test_buffers_follow_rank_0(ranks):
    ranks(buffers_follow_rank_0)
