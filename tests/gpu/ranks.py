"""Several ranks on the GPUs at hand, for the tests of r4d on them."""

import pytest
import torch
import torch.distributed as dist

from tests.ranks.test_exact import expected, inputs_of
from tp3.comm.launch import launch

MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a GPU"),
    pytest.mark.timeout(300),
]
W = 3
SIZES = [8, 1000, 4096, 131_072, 1_000_000]  # sentinel, one-shot and two-shot; two are unaligned
SOON = 8.0


def on_gpus(function, *args, world_size=W, **options):
    return launch(function, world_size, *args, device="cuda", start="spawn", **options)


def group():
    return dist.group.WORLD.group


class Sums:
    """All-reduces of seeded bf16 data whose canonical sum is known."""

    def __init__(self, rank):
        self.inputs = inputs_of("cancelling", torch.bfloat16, W)
        self.total = expected("cancelling", torch.bfloat16, W)
        self.rank = rank

    def fill(self, x, start):
        """Put other data into x; what they will sum to."""
        rows = slice(start, start + x.numel())
        x.copy_(torch.from_numpy(self.inputs[self.rank][rows]))
        return torch.from_numpy(self.total[rows]).to(torch.bfloat16)
