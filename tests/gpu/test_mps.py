"""Under MPS the kernels of several ranks share one GPU at the same time: what a rank does while the
others wait for it in a sum must not depend on their ending.
"""

import shutil
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tp3.comm.launch import launch
from tp3.smoke.mps import CONTROL, mps_daemon

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a GPU"),
    pytest.mark.skipif(shutil.which(CONTROL) is None, reason=f"needs {CONTROL}"),
    pytest.mark.timeout(300),
]
W = 3
FEW, MANY = 4 << 10, 150 << 10  # elements of fp32: a few blocks wait, or as many as may
# How the others wait: in a sum of so many elements, and with a copy to the host behind it, as an
# engine has that goes on to the next step.
TURNS = ((FEW, False), (MANY, False), (FEW, True))
LATE_S = 0.3
SOON = timedelta(seconds=10)


def matrix(dtype, size=2048):
    return torch.ones(size, size, dtype=dtype, device="cuda")


def copied_behind(mine):
    """A copy to the host on another stream, behind what this one has; it and its event."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        return mine.to("cpu", non_blocking=True), side.record_event()


def copied_by_another_stream():
    """A copy that a thread waits for."""
    there, event = copied_behind(torch.ones(1 << 20, device="cuda"))
    thread = threading.Thread(target=event.synchronize)
    thread.start()
    thread.join()
    assert there.sum() == 1 << 20


def of_triton(turn):
    """Kernels that this process has not loaded, and perhaps not compiled, yet."""
    from tp3.kernels.mxfp4_linear import mxfp4_linear

    rows, k = (3, 40, 3)[turn], (2048, 2048, 256)[turn]  # more rows, and one slab: other kernels
    codes = torch.zeros(96, k // 2, dtype=torch.uint8, device="cuda")
    mxfp4_linear(torch.ones(rows, k, device="cuda").bfloat16(), codes, codes[:, : k // 32] + 127)


def of_torch(turn):
    """Kernels that this process has not loaded yet."""
    zeros = torch.zeros(100_000, device="cuda")
    (torch.erfinv, torch.lgamma, torch.digamma)[turn](zeros)
    torch.sort((zeros, zeros.short(), zeros.double())[turn])


def graph():
    mine = torch.zeros(16, device="cuda")
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        mine.add_(1)
    captured.replay()


# By what rank 0 does.
CHORES = {
    "nothing": lambda turn: None,
    "synchronize": lambda turn: torch.cuda.synchronize(),
    "load torch's kernels": of_torch,
    "load Triton's kernels": of_triton,
    "product in bf16": lambda turn: matrix(torch.bfloat16) @ matrix(torch.bfloat16),
    "product in fp32": lambda turn: matrix(torch.float32) @ matrix(torch.float32),
    "memory": lambda turn: torch.ones(300 << 20, dtype=torch.uint8, device="cuda"),
    "memory given back": lambda turn: torch.cuda.empty_cache(),
    "pinned memory": lambda turn: torch.empty(
        (48 + turn) << 20, dtype=torch.uint8, pin_memory=True
    ),
    "copy to the host": lambda turn: torch.ones(1 << 20, device="cuda").cpu(),
    "copy from the host": lambda turn: torch.ones(1 << 20).to("cuda"),
    "copy from pinned memory": lambda turn: torch.ones(1 << 10, pin_memory=True).to("cuda"),
    "copy by another stream": lambda turn: copied_by_another_stream(),
    "graph": lambda turn: graph(),
}


def late_with(chore, turn, group, rank):
    """Rank 0 does something else first. How it ended, in words."""
    size, copies = TURNS[turn]
    mine = torch.full((size,), float(rank), device="cuda")
    dist.all_reduce(mine.clone(), group=group)
    torch.cuda.synchronize()
    if rank == 0:
        time.sleep(LATE_S)
        chore(turn)
    try:
        dist.all_reduce(mine, group=group)
        if copies and rank:
            copied_behind(mine)
        torch.cuda.synchronize()
        dist.barrier(group=group)
    except RuntimeError as error:
        return str(error)
    return "" if (mine == sum(range(W))).all() else f"sums {mine.unique().tolist()}"


def gathers(group, rank):
    """Messages of many chunks each way, as of logits, between sums."""
    for number in range(20):
        dist.all_reduce(torch.ones(FEW, device="cuda"), group=group)
        mine = torch.full((148, 2688), float(rank + number), device="cuda")
        out = torch.empty((W * 148, 2688), device="cuda")
        dist.all_gather_into_tensor(out, mine, group=group)
        firsts = [part[0, 0].item() for part in out.chunk(W)]
        if firsts != [float(r + number) for r in range(W)]:
            return f"gathered {firsts}"
    return ""


def every_chore(rank, world_size):
    found = {}
    for turn, others in enumerate(TURNS):
        for name, chore in CHORES.items():
            group = dist.new_group(timeout=SOON)
            found[f"{name}, {others}"] = late_with(chore, turn, group, rank)
    found["gathers"] = gathers(dist.new_group(timeout=SOON), rank)
    return {name: words for name, words in found.items() if words}


def test_what_a_late_rank_does_does_not_wait_for_those_that_wait_for_it():
    with mps_daemon() as env:
        failed = launch(every_chore, W, device="cuda", start="spawn", timeout=240, env=env)
    assert failed == [{}] * W
