"""One rank of test_hosts: every collective over several hosts, against what each rank can compute
by itself.
"""

import hashlib
import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


def data(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + numel)
    spread = torch.randint(-12, 13, (numel,), generator=generator)
    return (torch.randn(numel, generator=generator) * torch.exp2(spread)).to(dtype)


def canonical(terms: list[torch.Tensor]) -> torch.Tensor:
    total = terms[0].float()
    for term in terms[1:]:
        total = total + term.float()
    return total.to(terms[0].dtype)


def checks(rank: int, world_size: int):
    """Pairs of (name, whether it held); raising is a failure too."""
    everyone = range(world_size)
    for dtype in (torch.float32, torch.bfloat16):
        terms = [data(r, 4097, dtype) for r in everyone]
        mine = terms[rank].clone()
        dist.all_reduce(mine)
        yield f"all_reduce small {dtype}", torch.equal(mine, canonical(terms))
        part = torch.empty(1365, dtype=dtype)
        whole = [data(r, 1365 * world_size, dtype) for r in everyone]
        dist.reduce_scatter_tensor(part, whole[rank].clone())
        expected = canonical([t.view(world_size, -1)[rank] for t in whole])
        yield f"reduce_scatter {dtype}", torch.equal(part, expected)
        mine = terms[rank].clone()
        dist.reduce(mine, dst=1)
        wanted = canonical(terms) if rank == 1 else terms[rank]
        yield f"reduce {dtype}", torch.equal(mine, wanted)
    small = [
        torch.randint(-9, 9, (300_001,), generator=torch.Generator().manual_seed(r))
        for r in everyone
    ]
    for op, expected in (
        (dist.ReduceOp.SUM, sum(small)),
        (dist.ReduceOp.MAX, torch.stack(small).amax(0)),
        (dist.ReduceOp.AVG, sum(small) / world_size),
    ):
        mine = small[rank].float()
        dist.all_reduce(mine, op)
        yield f"all_reduce large {op}", torch.equal(mine, expected.float())
    outs = [torch.empty(r + 1, dtype=torch.int64) for r in everyone]
    dist.all_gather(outs, torch.full((rank + 1,), rank))
    yield "all_gather", all(bool((out == r).all()) for r, out in enumerate(outs))
    value = torch.full((5,), rank)
    dist.broadcast(value, src=world_size - 1)
    yield "broadcast", bool((value == world_size - 1).all())
    outs = [torch.empty(r + 1) for r in everyone]
    dist.all_to_all(outs, [torch.full((rank + 1,), 10.0 * rank + r) for r in everyone])
    yield "all_to_all", all(bool((out == 10 * r + rank).all()) for r, out in enumerate(outs))
    parts = [torch.empty(3) for _ in everyone] if rank == 1 else None
    dist.gather(torch.full((3,), float(rank)), parts, dst=1)
    yield "gather", parts is None or all(bool((p == r).all()) for r, p in enumerate(parts))
    part = torch.empty(3)
    dist.scatter(part, [torch.full((3,), 7.0 * r) for r in everyone] if rank == 0 else None, src=0)
    yield "scatter", bool((part == 7 * rank).all())
    incoming = torch.empty(50_000)
    sending = dist.isend(torch.full((50_000,), float(rank)), (rank + 1) % world_size, tag=3)
    dist.recv(incoming, (rank - 1) % world_size, tag=3)
    sending.wait()
    yield "send/recv", bool((incoming == (rank - 1) % world_size).all())
    objects: list = [None] * world_size
    dist.all_gather_object(objects, {"rank": rank})
    yield "objects", [o["rank"] for o in objects] == list(everyone)
    dist.barrier()
    dist.monitored_barrier(timeout=timedelta(seconds=20))
    yield "barriers", True


def hashes(rank: int, world_size: int) -> list[str]:
    """Digests of large sums, which must be the same bits on all ranks, whatever their order."""
    digests = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        mine = data(rank, 300_001, dtype).clamp(-100, 100)
        dist.all_reduce(mine)
        digests.append(hashlib.sha256(mine.view(torch.uint8).numpy().tobytes()).hexdigest())
    return digests


def main() -> None:
    rank, world_size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    dist.init_process_group(
        "r4d",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )
    errors = [name for name, held in checks(rank, world_size) if not held]
    digests = hashes(rank, world_size)
    group = dist.group.WORLD
    group = getattr(group, "group", None) or group._get_backend(torch.device("cpu")).group
    try:
        dist.all_reduce(torch.ones(3 + rank % 2))
    except RuntimeError as error:
        if "different calls" not in str(error):
            errors.append(f"disagreement says {error}")
    else:
        errors.append("a disagreement passed")
    record = {"errors": errors, "hashes": digests, "stats": group.stats(), "hosts": group.hosts}
    (folder / f"{rank}.json").write_text(json.dumps(record))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
