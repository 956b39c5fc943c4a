"""The fused all-reduce and norm across processes, in the interpreter: bit by bit what the plain
kernel makes of the exact sum, among launches of the other kernels, with late ranks.
"""

import importlib.util
import random
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.kernels import norms
from tests.kernels.alone import Alone
from tests.kernels.interpreted import Interpreted, late, meet
from tests.kernels.norms import BF16, NORMS, Placed
from tests.kernels.test_protocol import check_gather, check_sum
from tp3.comm.layout import MAX_BLOCKS, DeviceLayout
from tp3.kernels.normed import Norm

TIMED_OUT, SENTINEL = 1, 3
CODE, KIND, SEQUENCE, LATE = 1, 2, 3, 8  # words of the page
SHAPES = [(0, 8), (1, 8), (3, 8), (3, 24), (1, 1000), (3, 1000), (5, 136), (2, 5120)]
CALLS = {2: 60, 3: 45, 5: 12}
STARTS = {2: 2**31 - 20, 3: 2**32 - 20, 5: 0}
SHORT_SECONDS = 0.02


def layout_of(world_size):
    """Of slots that hold every one of SHAPES."""
    return DeviceLayout(world_size, slot_bytes=4 << 10, sentinel_bytes=32 << 10, channels=4)


def fused(transport, x, residual, weight, norm, to):
    from tp3.comm.collectives.device import nq

    nq(transport, x, residual, weight, norm, to)


def check_norm(transport, rows, width, norm, salt):
    """One call on data that all ranks can compute. Errors: AssertionError with the coordinate."""
    from tp3.kernels.norm import add_rms_norm

    xs, total = norms.terms(transport.world_size, rows, width, salt)
    residual, weight = norms.values(width, rows, salt), norms.values(width, salt=salt)[0]
    x, to = xs[transport.rank].clone(), Placed(xs[0], norm)
    fused(transport, x, residual, weight, norm, to.normed)
    label = f"[{rows}, {width}] {norm}, call {salt}, rank {transport.rank}"
    assert not transport.page[CODE], f"{label}: the kernel reported {transport.page[:16]}"
    to.check(label, add_rms_norm(total, residual, weight, norm))
    assert torch.equal(x, xs[transport.rank]), f"{label}: x has changed"


def every_norm(rank, world_size, layout, folder):
    transport, chance = Interpreted(folder, rank, layout), random.Random(rank)
    for number, norm in enumerate(NORMS):
        for rows, width in SHAPES:
            late(chance, 0.01)
            transport.max_blocks = 1 + number % 4
            check_norm(transport, rows, width, norm, number)
    return number + 1


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_norm_and_shape(interpreter, world_size, tmp_path):
    done = interpreter.ranks(every_norm, layout_of(world_size), tmp_path)
    assert done == [len(NORMS)] * world_size


def mixed_launches(rank, world_size, layout, folder):
    """The fused kernel among others that share its slots, or do not, with changing grids."""
    transport = Interpreted(folder, rank, layout)
    shared, chance = random.Random(world_size), random.Random(100 + rank)
    launches = 0
    for number in range(CALLS[world_size]):
        late(chance)
        transport.max_blocks = shared.choice((1, 2, 3, 4))
        kernel = shared.choice(("nq", "nq", "nq", "sentinel", "sentinel", "one-shot", "exchange"))
        launches += kernel in ("nq", "sentinel")
        if kernel == "nq":
            rows, width = shared.choice(SHAPES)
            launches -= not rows
            check_norm(transport, rows, width, shared.choice(NORMS), number)
        elif kernel == "exchange":
            check_gather(transport, shared.randrange(1, 3000), number)
        else:
            vectors = shared.choice((1, 17, 64, 130, 500))
            check_sum(transport, kernel, BF16, "SUM", vectors, in_place=False, salt=number)
    copies = transport.words[layout.SENTINELS // 4 :][:MAX_BLOCKS]
    assert (copies == copies[0]).all()
    assert int(np.uint32(copies[0]) - np.uint32(STARTS[world_size])) == launches
    ones = np.frombuffer(transport.memories[rank][1], np.uint8)[layout.sentinels : layout.rings]
    meet(folder, rank, world_size, "ended")
    assert (ones == 0xFF).all(), "the ones are not back in the slots"
    return launches


@pytest.mark.parametrize("world_size", CALLS, ids=lambda w: f"W{w}-from-{STARTS[w]}")
def test_plain_and_fused_launches_take_turns(interpreter, world_size, tmp_path):
    launches = interpreter.ranks(
        mixed_launches, layout_of(world_size), tmp_path, start=STARTS[world_size]
    )
    assert len(set(launches)) == 1
    assert launches[0] > 20 or not STARTS[world_size], "the counters were to wrap"


def with_nan(rank, world_size, layout, folder):
    """Every NaN that there is, ones among them, and infinities of both signs that cancel."""
    transport = Interpreted(folder, rank, layout)
    x = torch.ones(3, 256, dtype=BF16)
    if rank == 1:
        x.view(torch.int16)[0, 9] = -1
    x[1, 9] = (-1) ** rank * torch.inf
    residual, weight = torch.zeros_like(x), torch.ones(256, dtype=BF16)
    found = []
    for norm in NORMS:
        to = Placed(x, norm)
        fused(transport, x, residual, weight, norm, to.normed)
        assert not transport.page[CODE], transport.page[:16]
        out, kept, scale = to.normed
        rows = out.float().isnan().all(1).tolist() if scale is None else _lost(scale)
        found.append((rows, kept.isnan().nonzero().tolist(), bool(out[2].float().isnan().any())))
    return found


def _lost(scale):
    return (scale.isnan() if scale.dim() == 1 else scale.isnan().all(1)).tolist()


def test_nan_and_infinity_come_out_as_such(interpreter, tmp_path):
    for found in interpreter.ranks(with_nan, layout_of(3), tmp_path):
        assert found == [([True, True, False], [[0, 9], [1, 9]], False)] * len(NORMS)


def in_vain(folder):
    """Rank 0 waits for rank 2; rank 1 has sent what its launch sends. Then again."""
    facts = []
    for number, norm in enumerate(NORMS):
        t = Alone(folder / str(number), 0)
        t.limit_seconds = SHORT_SECONDS
        t.data[0][t.slot(0, 1, 1, sentinel=True)][: 3 * 24 * 2] = 0
        x = norms.values(24, 3)
        for _ in range(2):
            to = Placed(x, norm)
            fused(t, x, x, x[0], norm, to.normed)
            lost = [bool(p.float().isnan().all()) for p in to.normed if p is not None]
            facts.append((all(lost), t.page[CODE : SEQUENCE + 1].tolist(), t.page[LATE:].tolist()))
        facts[-1] += (int(t.words[t.layout.STICKY // 4]),)
    return facts


def test_a_rank_that_does_not_come_is_told_and_all_is_nan(interpreter, tmp_path):
    facts = interpreter.alone(in_vain, tmp_path)
    page = [TIMED_OUT, SENTINEL, 1]
    late_ranks = [0, 0, 1] + [0] * 53
    assert facts == [(True, page, late_ranks), (True, page, late_ranks, 1)] * len(NORMS)


def after_a_failure(folder):
    """All data have come, but the group has failed before."""
    lost = []
    for number, norm in enumerate(NORMS):
        t = Alone(folder / str(number), 0)
        t.words[t.layout.STICKY // 4] = 1
        for sender in (1, 2):
            t.data[0][t.slot(0, sender, 1, sentinel=True)][: 3 * 24 * 2] = 0
        x = norms.values(24, 3)
        to = Placed(x, norm)
        fused(t, x, x, x[0], norm, to.normed)
        lost += [bool(p.float().isnan().all()) for p in to.normed if p is not None]
    return lost


def test_after_a_failure_all_is_nan(interpreter, tmp_path):
    assert all(interpreter.alone(after_a_failure, tmp_path))


def pushed(folder):
    """What a rank stores at its peers, by the layout's text: its x, at the places of its values."""
    t = Alone(folder, 1)
    t.max_blocks = 2
    xs, _ = norms.terms(3, 3, 24)
    for r in t.others:
        sent = xs[r].view(torch.uint8).numpy().flatten()
        t.data[1][t.slot(1, r, 1, sentinel=True)][: sent.size] = sent
        mine = xs[1].view(torch.uint8).numpy().flatten()
        t.expected[r][1][t.slot(r, 1, 1, sentinel=True)][: mine.size] = mine
    norm = Norm(1e-6)
    fused(t, xs[1], xs[0], xs[0][0], norm, Placed(xs[0], norm).normed)
    t.check_peers("nq")
    t.check_counter("nq", t.layout.SENTINELS, 1)
    t.check_counter("nq leaves the others'", t.layout.LAUNCHES, 0)
    return True


def test_what_a_rank_pushes(interpreter, tmp_path):
    assert interpreter.alone(pushed, tmp_path)


def compared(rank, world_size, layout, folder, wrong):
    """The fused kernel passes, or is rejected: ``wrong`` adds the residual to a sum in fp32."""
    if wrong:
        from tp3.kernels import norm, sentinel_norm

        text, line = Path(norm.__file__).read_text(), '    y = widened(narrowed(total, "SUM", 1, '
        assert text.count(line) == 1
        path = folder / f"norm_{rank}.py"
        path.write_text(text.replace(line, "    y = total #"))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        broken = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(broken)
        sentinel_norm.finish_row = broken.finish_row
    seen = pytest.raises(AssertionError, match="differ, first at") if wrong else nullcontext()
    with seen:
        check_norm(Interpreted(folder, rank, layout), 3, 1000, Norm(1e-6), 0)
    return True


def test_a_residual_added_before_the_sum_is_rounded_is_seen(interpreter, tmp_path):
    for wrong in (False, True):
        folder = tmp_path / str(wrong)
        assert interpreter.ranks(compared, layout_of(3), folder, wrong) == [True] * 3
