"""send, recv and their batched, tagged, any-source and object forms."""

import itertools
import time

import numpy as np
import torch
import torch.distributed as dist

from tests.ranks.reference import (
    LAYOUTS,
    MOVED,
    SIZES,
    Placed,
    everyone,
    lacks,
    poisoned,
    raises,
    same,
    tensor,
)

F32 = torch.float32


def neighbours(rank, world_size):
    return (rank - 1) % world_size, (rank + 1) % world_size


def ring(rank, world_size):
    before, after = neighbours(rank, world_size)
    layouts = [each for each in LAYOUTS if not lacks("layout", each)] or ["plain"]
    dtypes = [dtype for dtype in MOVED if not lacks("send", dtype)]
    for dtype, layout in itertools.product(dtypes, layouts):
        inputs = everyone(world_size, (7, 2), dtype)
        mine, out = Placed(inputs[rank], dtype, layout), Placed(np.zeros((7, 2)), dtype, layout)
        if rank % 2:
            source = dist.recv(out.view, before)
            dist.send(mine.view, after)
        else:
            work = dist.isend(mine.view, after)
            source = dist.recv(out.view, before)
            work.wait()
        assert source == before, (source, before)
        out.check(f"ring {dtype} {layout}", inputs[before])


def test_send_and_recv_around_a_ring(ranks):
    ranks(ring)


def isend_first(rank, world_size):
    before, after = neighbours(rank, world_size)
    for size in [*SIZES, (1 << 20) + 1]:
        inputs = everyone(world_size, size, F32)
        work = dist.isend(tensor(inputs[rank], F32), after)
        out = poisoned(size, F32)
        assert dist.recv(out, before) == before
        work.wait()
        same(f"isend before recv, {size}", out, inputs[before])


def test_isend_does_not_block(ranks):
    ranks(isend_first)


def in_order(rank, world_size):
    """Messages of one tag arrive in the order sent, whatever their sizes."""
    sizes = [1, 5000, 3, 70000, 0, 17] * 5
    if rank == 0:
        for peer in range(1, world_size):
            works = [
                dist.isend(torch.full((n,), 10.0 * i + peer), peer) for i, n in enumerate(sizes)
            ]
            for work in works:
                work.wait()
    else:
        outs = [poisoned(n, F32) for n in sizes]
        works = [dist.irecv(out, 0) for out in outs]
        for work in works:
            work.wait()
        for i, out in enumerate(outs):
            same(f"message {i}", out, np.full(sizes[i], 10 * i + rank))


def test_messages_keep_their_order(ranks):
    ranks(in_order)


def tags(rank, world_size):
    count = 9
    if rank == 0:
        for peer in range(1, world_size):
            works = [dist.isend(torch.full((40,), i), peer, tag=i) for i in range(count)]
            for work in works:
                work.wait()
    else:
        for i in reversed(range(count)):
            out = poisoned(40, torch.int64)
            dist.recv(out, 0, tag=i)
            same(f"tag {i}", out, np.full(40, i))


def test_tags_out_of_order(ranks):
    ranks(tags)


def any_source(rank, world_size):
    if rank == 0:
        for round_ in range(3):
            seen = set()
            for _ in range(world_size - 1):
                out = poisoned(11, F32)
                source = dist.recv(out, tag=round_)
                same(f"from {source}", out, np.full(11, source * 10 + round_))
                seen.add(source)
            assert seen == set(range(1, world_size)), seen
    else:
        time.sleep(0.01 * (world_size - rank))
        for round_ in range(3):
            dist.send(torch.full((11,), rank * 10.0 + round_), 0, tag=round_)


def test_any_source(ranks):
    ranks(any_source)


def batch(rank, world_size):
    before, after = neighbours(rank, world_size)
    for size in (1, 17, 300_000):
        inputs = everyone(world_size, size, F32)
        mine = tensor(inputs[rank], F32)
        outs = [poisoned(size, F32) for _ in range(world_size)]
        operations = [dist.P2POp(dist.isend, mine, after), dist.P2POp(dist.irecv, outs[0], before)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        same(f"batch around a ring, {size}", outs[0], inputs[before])
        peers = [peer for peer in range(world_size) if peer != rank]
        operations = [dist.P2POp(dist.irecv, outs[peer], peer) for peer in peers]
        operations += [dist.P2POp(dist.isend, mine, peer) for peer in peers]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        for peer in peers:
            same(f"batch with all, {size}, from {peer}", outs[peer], inputs[peer])


def coalesced(rank, world_size):
    """Gloo does not know this form."""
    before, after = neighbours(rank, world_size)
    outs = [poisoned(50, F32) for _ in range(3)]
    if rank == 0:
        time.sleep(0.3)
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        for number, out in enumerate(outs):
            dist.isend(torch.full((50,), float(rank + 10 * number)), after)
            dist.irecv(out, before)
    (work,) = manager.works
    work.get_future().wait()
    assert all((out == before + 10 * number).all() for number, out in enumerate(outs))
    assert work.is_completed()
    manager.wait()


def test_messages_in_a_coalescing_manager(ranks):
    if not lacks("send", "coalesced"):
        ranks(coalesced)


def test_batch_isend_irecv(ranks):
    ranks(batch)


def mixed_with_collectives(rank, world_size):
    before, after = neighbours(rank, world_size)
    for i in range(20):
        out = poisoned(100 + i, F32)
        receiving = dist.irecv(out, before, tag=i)
        total = torch.full((10,), float(i))
        dist.all_reduce(total)
        sending = dist.isend(torch.full((100 + i,), float(rank)), after, tag=i)
        dist.barrier()
        sending.wait()
        receiving.wait()
        same("message across collectives", out, np.full(100 + i, before))
        same("all_reduce among messages", total, np.full(10, i * world_size))


def test_messages_mixed_with_collectives(ranks):
    ranks(mixed_with_collectives)


def objects(rank, world_size):
    if rank == 0:
        for peer in range(1, world_size):
            dist.send_object_list([peer, "text", {"a": [1, 2]}], dst=peer)
    else:
        got = [None] * 3
        assert dist.recv_object_list(got, src=0) == 0
        assert got == [rank, "text", {"a": [1, 2]}]


def test_object_lists(ranks):
    ranks(objects)


def refused(rank, world_size):
    errors = (ValueError, RuntimeError)
    raises(errors, dist.send, torch.ones(1), rank)
    raises(errors, dist.recv, torch.ones(1), rank)
    if not lacks("refusal", "rank out of range"):
        raises(errors, dist.send, torch.ones(1), world_size)
        raises(errors, dist.isend, torch.ones(1), world_size)
    dist.barrier()


def test_bad_peers_are_refused_and_the_group_goes_on(ranks):
    ranks(refused)
