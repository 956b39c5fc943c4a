"""A wait that ends in vain: the output is all ones (NaN), the page says who was late, and the rank
pushes nothing any more. An abort word ends a wait early; a message of another size or tag is told.
"""

import threading
import time

import numpy as np
import pytest
import torch

from tests.kernels import interpreted
from tests.kernels.alone import Alone
from tests.kernels.interpreted import (
    TILE_BYTES,
    Interpreted,
    create,
    layout_of,
    meet,
    start_sum,
)
from tests.kernels.sums import Guarded
from tests.kernels.test_protocol import pattern

KINDS = {"one-shot": 1, "two-shot": 2, "sentinel": 3, "exchange": 4}
NUMEL = 96
CODE, KIND, SEQUENCE, LATE, SIZES = 1, 2, 3, 8, 24  # words of the page
TIMED_OUT, MISMATCH = 1, 2
SHORT_SECONDS = 0.02  # of the interpreter's clock, which is slow


def call(transport, kernel):
    """The output, [W, NUMEL] for exchange (row r from rank r)."""
    x = Guarded.holding(torch.full((NUMEL,), 1.0 + transport.rank))
    if kernel != "exchange":
        out = Guarded(NUMEL, torch.float32)
        start_sum(transport, kernel, x.view, out.view)
        return out.view
    out = Guarded(transport.world_size * NUMEL, torch.float32)
    transport.kernels.exchange(
        transport,
        sources=transport.kernels.Strided(x.view.data_ptr()),
        targets=transport.kernels.Strided(out.view.data_ptr(), 4 * NUMEL),
        num_bytes=4 * NUMEL,
        lanes=(0, 2 * transport.world_size),
    )
    return out.view.view(-1, NUMEL)


def lost(tensor):
    return bool((tensor.view(torch.int32) == -1).all()) and bool(torch.isnan(tensor).all())


def without_rank_two(rank, world_size, layout, folder):
    """What the two that came found, by kernel; each has memory of its own."""
    interpreted.TURN_SECONDS = 0.02  # neither may find the other late, however busy the machine is
    return {kernel: _without(rank, layout, folder / kernel, kernel) for kernel in KINDS}


def _without(rank, layout, folder, kernel):
    if rank == 2:
        return None
    if rank == 0:
        create(folder, layout)
    meet(folder.parent, rank, 2, f"made-{kernel}")
    transport = Interpreted(folder, rank, layout)
    transport.limit_seconds = SHORT_SECONDS
    meet(folder, rank, 2, "start")
    first = call(transport, kernel)
    meet(folder, rank, 2, "failed")
    page, absent = transport.page.copy(), [bytes(memory) for memory in transport.memories[2]]
    sticky = int(transport.words[layout.STICKY // 4])
    meet(folder, rank, 2, "looked")
    second = call(transport, kernel)
    meet(folder, rank, 2, "again")
    untouched = absent == [bytes(memory) for memory in transport.memories[2]]
    if kernel == "exchange":
        came = [r for r in range(3) if (first[r] == 1.0 + r).all()]
        assert came == [0, 1], "the others' messages arrived"
        first, second = first[2], second[[1 - rank, 2]]
    return lost(first), lost(second), untouched, sticky, page[CODE : SEQUENCE + 1], page[LATE:]


def test_a_rank_that_never_comes(interpreter, tmp_path):
    *came, absent = interpreter.ranks(without_rank_two, layout_of(3), tmp_path)
    assert absent == dict.fromkeys(KINDS)
    for outcomes in came:
        for kernel, (*facts, report, late) in outcomes.items():
            assert facts == [True, True, True, 1], kernel  # lost, lost again, untouched, sticky
            assert report.tolist() == [TIMED_OUT, KINDS[kernel], 1], kernel
            assert late.tolist() == [0, 0, 1] + [0] * 53, kernel


def aborted(folder, word):
    """The wait would last a day; the host's word ends it, or lets it last half a minute at most,
    here a moment.
    """
    from tp3.kernels import primitives

    primitives.HURRY_NS = type(primitives.HURRY_NS)(int(1e9 * SHORT_SECONDS))
    outcomes = {}
    for kernel in KINDS:
        t = Alone(folder / kernel, 0, 2)
        t.limit_seconds = 86_400
        host = threading.Timer(0.1, t.page.__setitem__, (0, word))
        host.start()
        out = call(t, kernel)
        host.join()
        outcomes[kernel] = int(t.page[CODE]), lost(out[1] if kernel == "exchange" else out)
    return outcomes


@pytest.mark.parametrize("word", [1, 2])
def test_the_host_can_end_a_wait(interpreter, tmp_path, word):
    assert interpreter.alone(aborted, tmp_path, word) == dict.fromkeys(KINDS, (TIMED_OUT, True))


def hurried(folder):
    """A word of haste does not end a wait that has only begun."""
    t = Alone(folder, 0, 2)
    t.limit_seconds, t.page[0] = 86_400, 2
    start = time.monotonic()
    host = threading.Timer(0.3, t.page.__setitem__, (0, 1))
    host.start()
    call(t, "exchange")
    host.join()
    return time.monotonic() - start


def test_haste_gives_a_wait_half_a_minute(interpreter, tmp_path):
    assert interpreter.alone(hurried, tmp_path) >= 0.3


def failed_on_trial(folder):
    """A message that does not come fails what is on trial, not the group."""
    t = Alone(folder, 0, 2)
    t.limit_seconds = SHORT_SECONDS
    out = Guarded(NUMEL, torch.float32)
    nothing = [(0, 0), (0, 0)]
    takes = [(0, 0), (out.view.data_ptr(), 4 * NUMEL)]
    t.kernels.exchange_table(t, nothing, takes, trial=True)
    sticky, tried = t.words[t.layout.STICKY // 4], t.words[t.layout.TRIAL // 4]
    assert (int(sticky), int(tried)) == (0, 1)
    assert not t.page.any()
    return lost(out.view), t.trial_page[CODE : SEQUENCE + 1].tolist(), t.trial_page[LATE:][:2]


def test_what_is_on_trial_fails_alone(interpreter, tmp_path):
    gone, report, late = interpreter.alone(failed_on_trial, tmp_path)
    assert gone
    assert report == [TIMED_OUT, KINDS["exchange"], 1]
    assert late.tolist() == [0, 1]


def another_block_fails(folder):
    """While this block waits, another one of the launch reports and makes it stick."""
    outcomes = {}
    for kernel in KINDS:
        t = Alone(folder / kernel, 0, 2)
        t.limit_seconds = 86_400
        told = np.arange(100, 164, dtype=np.int32)
        told[:4] = 0, MISMATCH, KINDS["exchange"], 7

        def report(t=t, told=told):
            t.page[:] = told
            t.words[t.layout.STICKY // 4] = 1

        other = threading.Timer(0.1, report)
        other.start()
        out = call(t, kernel)
        other.join()
        kept = bool((t.page == told).all())
        outcomes[kernel] = kept, lost(out[1] if kernel == "exchange" else out)
    return outcomes


def test_the_first_report_stays(interpreter, tmp_path):
    assert interpreter.alone(another_block_fails, tmp_path) == dict.fromkeys(KINDS, (True, True))


def disagreeing(folder, sent, expected, channels):
    """Two ranks in one process: first the message goes into the ring, then it is looked at."""
    layout = layout_of(2)
    create(folder, layout)
    ranks = [Interpreted(folder, r, layout) for r in range(2)]
    kernels = ranks[0].kernels
    (sent_bytes, sent_tag), (num_bytes, tag) = sent, expected
    data, out = Guarded.holding(pattern(0, 1, sent_bytes)), Guarded(num_bytes, torch.uint8)
    for transport in ranks:
        transport.max_blocks, transport.limit_seconds = 4 * channels, SHORT_SECONDS
    here = kernels.Strided(data.view.data_ptr())
    kernels.exchange(ranks[0], sources=here, num_bytes=sent_bytes, lanes=(1, 1), tag=sent_tag)
    here = kernels.Strided(out.view.data_ptr())
    kernels.exchange(ranks[1], targets=here, num_bytes=num_bytes, lanes=(2, 1), tag=tag)
    page = ranks[1].page
    assert not ranks[0].page.any(), "the sender has not noticed"
    out.check("out", torch.full_like(out.view, 0xFF))
    assert ranks[1].words[layout.STICKY // 4] == 1
    return page[CODE : SEQUENCE + 1].tolist(), page[LATE : LATE + 2].tolist(), _sizes(page)


def _sizes(page):
    return page[SIZES : SIZES + 8].copy().view(np.int64).tolist()


LONG = 3 * (64 << 10)
DISAGREEMENTS = {
    "longer": ((64, 5), (48, 5), 1),
    "shorter": ((16, 5), (LONG, 5), 1),
    "other-tag": ((48, 4), (48, 5), 1),
    "fewer-channels": ((16, 5), (LONG, 5), 2),
}


def all_disagreements(folder):
    return {name: disagreeing(folder / name, *case) for name, case in DISAGREEMENTS.items()}


def test_a_message_of_another_size_or_tag(interpreter, tmp_path):
    for name, (report, late, sizes) in interpreter.alone(all_disagreements, tmp_path).items():
        sent, expected, _ = DISAGREEMENTS[name]
        assert report == [MISMATCH, KINDS["exchange"], 1], name
        assert late == [1, 0], name
        assert sizes == [sent[0], expected[0], sent[1], expected[1]], name


assert NUMEL * 4 < TILE_BYTES, "one block"
