"""Pipeline schedules over three ranks against the sequential model."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

MICROBATCHES = 6


def stages(num_stages: int) -> list[nn.Module]:
    torch.manual_seed(7)
    widths = [5, *(8 + i for i in range(num_stages - 1)), 3]
    return [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in pairwise(widths)]


def data(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    shape = 2 * MICROBATCHES
    return (
        torch.randn(shape, 5, generator=generator),
        torch.randn(shape, 3, generator=generator),
    )


def sequential(num_stages: int, steps: int) -> tuple[nn.Sequential, list[Tensor], Tensor]:
    model = nn.Sequential(*stages(num_stages))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        x, y = data(step)
        output = model(x)
        parts = zip(output.chunk(MICROBATCHES), y.chunk(MICROBATCHES))
        losses = [F.mse_loss(a, b) for a, b in parts]
        torch.stack(losses).mean().backward()
        optimizer.step()
    return model, [loss.detach() for loss in losses], output


def pipelined(rank: int, world_size: int, schedule_name: str, per_rank: int) -> None:
    schedule_class = {
        "gpipe": ScheduleGPipe,
        "1f1b": Schedule1F1B,
        "interleaved": ScheduleInterleaved1F1B,
    }[schedule_name]
    num_stages = per_rank * world_size
    mine = range(rank, num_stages, world_size)
    modules = [stages(num_stages)[index] for index in mine]
    built = [
        PipelineStage(module, index, num_stages, torch.device("cpu"))
        for module, index in zip(modules, mine)
    ]
    schedule = schedule_class(
        built if schedule_name == "interleaved" else built[0], MICROBATCHES, loss_fn=F.mse_loss
    )
    parameters = [p for module in modules for p in module.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    first, last = 0 in mine, num_stages - 1 in mine
    steps = 2
    for step in range(steps):
        optimizer.zero_grad()
        x, y = data(step)
        losses: list[Tensor] = []
        inputs = (x,) if first else ()
        extra = {"target": y, "losses": losses} if last else {}
        output = schedule.step(*inputs, **extra)
        optimizer.step()

    want, want_losses, want_output = sequential(num_stages, steps)
    for index, module in zip(mine, modules):
        for got, p in zip(module.parameters(), want[index].parameters(), strict=True):
            torch.testing.assert_close(got.grad, p.grad, rtol=1e-5, atol=1e-7)
            torch.testing.assert_close(got, p, rtol=1e-5, atol=1e-6)
    if last:
        torch.testing.assert_close(output, want_output)
        torch.testing.assert_close(torch.stack(losses).detach(), torch.stack(want_losses))


def test_gpipe(ranks):
    ranks(pipelined, "gpipe", 1)


def test_one_forward_one_backward(ranks):
    ranks(pipelined, "1f1b", 1)


def test_interleaved_with_two_stages_a_rank(ranks):
    ranks(pipelined, "interleaved", 2)
