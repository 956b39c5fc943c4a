"""One rank against played peers: which bytes it pushes where, which flags it publishes, what it
leaves alone; and that it believes a flag only when it may.
"""

import numpy as np
import torch

from tests.kernels.alone import ACKNOWLEDGED, ARRIVED, CHUNK, RECEIVED, SENT, Alone, bytes_of
from tests.kernels.interpreted import TILE_BYTES, start_sum
from tests.kernels.sums import Guarded, held, inputs, reduced
from tests.kernels.test_protocol import pattern
from tp3.comm.layout import MAX_BLOCKS

CASES = [(1, 41), (2, 2**31 - 2), (0, 2**32 - 1)]  # our rank, rounds until now
FLOAT = torch.float32


def one_shot(folder, rank, start):
    """Two blocks, two rounds; the last tile has five vectors."""
    t = Alone(folder, rank, start=start)
    t.max_blocks, numel = 2, 3 * TILE_BYTES // 4 + 20
    arrays = inputs(FLOAT, "SUM", 3, numel)
    tensors = [held(array, FLOAT) for array in arrays]
    for r in t.others:
        t.arrive(r, blocks=2, rounds=2)
        for tile in range(4):
            turn, block = divmod(tile, 2)
            part = slice(block * TILE_BYTES, (block + 1) * TILE_BYTES)
            for sender, receiver in ((r, t.rank), (t.rank, r)):
                sent = bytes_of(tensors[sender])[tile * TILE_BYTES : (tile + 1) * TILE_BYTES]
                memory = t.data[receiver] if receiver == t.rank else t.expected[receiver][1]
                memory[t.slot(receiver, sender, turn + 1)][part][: len(sent)] = sent
        t.publish(r, blocks=2, rounds=2)
    x, out = Guarded.holding(tensors[t.rank]), Guarded(numel, FLOAT)
    start_sum(t, "one-shot", x.view, out.view)
    out.check("one-shot", held(reduced(FLOAT, "SUM", arrays), FLOAT))
    t.check_peers("one-shot")
    t.check_counter("one-shot", t.layout.LAUNCHES, 2)
    t.check_counter("one-shot leaves the sentinel's", t.layout.SENTINELS, 0)


def reduce_scatter(folder, rank, start):
    """Rank r gets part r of what this rank has, in round 1."""
    t = Alone(folder, rank, start=start)
    numel = TILE_BYTES // 4 - 8
    arrays = inputs(FLOAT, "SUM", 3, 3 * numel)
    parts = [held(array, FLOAT).view(3, numel) for array in arrays]
    for r in t.others:
        t.arrive(r, blocks=1, rounds=1)
        t.data[t.rank][t.slot(t.rank, r, 1)][: 4 * numel] = bytes_of(parts[r][t.rank])
        t.expected[r][1][t.slot(r, t.rank, 1)][: 4 * numel] = bytes_of(parts[t.rank][r])
        t.publish(r, blocks=1, rounds=1)
    x, out = Guarded.holding(parts[t.rank].flatten()), Guarded(numel, FLOAT)
    start_sum(t, "reduce-scatter", x.view, out.view)
    want = held(reduced(FLOAT, "SUM", arrays), FLOAT).view(3, numel)[t.rank]
    out.check("reduce-scatter", want)
    t.check_peers("reduce-scatter")
    t.check_counter("reduce-scatter", t.layout.LAUNCHES, 1)


def two_shot(folder, rank, start):
    """Parts of 67, 67 and 66 vectors, two blocks: x goes out in round 1, the sum in round 2."""
    t = Alone(folder, rank, start=start)
    numel, part = 4 * 200, 4 * 67
    arrays = inputs(FLOAT, "SUM", 3, numel)
    total = held(reduced(FLOAT, "SUM", arrays), FLOAT)

    def own(tensor, r):
        return bytes_of(tensor[r * part : (r + 1) * part])

    for r in t.others:
        t.arrive(r, blocks=2, rounds=2)
        given = own(held(arrays[r], FLOAT), t.rank)
        t.data[t.rank][t.slot(t.rank, r, 1)][: len(given)] = given
        t.data[t.rank][t.slot(t.rank, r, 2)][: len(own(total, r))] = own(total, r)
        pushed = own(held(arrays[t.rank], FLOAT), r)
        t.expected[r][1][t.slot(r, t.rank, 1)][: len(pushed)] = pushed
        mine = own(total, t.rank)
        t.expected[r][1][t.slot(r, t.rank, 2)][: len(mine)] = mine
        t.publish(r, blocks=2, rounds=2)
    x, out = Guarded.holding(held(arrays[t.rank], FLOAT)), Guarded(numel, FLOAT)
    start_sum(t, "two-shot", x.view, out.view)
    out.check("two-shot", total)
    t.check_peers("two-shot")
    t.check_counter("two-shot", t.layout.LAUNCHES, 2)


def sentinel(folder, rank, start):
    """One of our values is the sentinel itself: it travels as another NaN."""
    t = Alone(folder, rank, start=start)
    numel = TILE_BYTES // 4 + 4
    arrays = inputs(FLOAT, "SUM", 3, numel)
    tensors = [held(array, FLOAT) for array in arrays]
    tensors[t.rank].view(torch.int32)[3] = -1
    arrived = tensors[t.rank].clone()
    arrived.view(torch.int32)[3] = 0x7FFFFFFF
    for r in t.others:
        there, here = (t.slot(*pair, 1, sentinel=True) for pair in ((r, t.rank), (t.rank, r)))
        t.data[t.rank][here][: 4 * numel] = bytes_of(tensors[r])
        t.expected[r][1][there][: 4 * numel] = bytes_of(arrived)
    x, out = Guarded.holding(tensors[t.rank]), Guarded(numel, FLOAT)
    start_sum(t, "sentinel", x.view, out.view)
    want = held(reduced(FLOAT, "SUM", arrays), FLOAT)
    want[3] = out.view[3]
    assert torch.isnan(out.view[3])
    out.check("sentinel", want)
    t.check_peers("sentinel")
    t.check_counter("sentinel", t.layout.SENTINELS, 1)
    t.check_counter("sentinel leaves one-shot's", t.layout.LAUNCHES, 0)
    slots = t.data[t.rank][t.layout.sentinels : t.layout.rings]
    assert (slots == 0xFF).all(), "the ones are back"


def exchange(folder, _, start):
    """Rank 1: to rank 0 three chunks on two channels, from rank 2 one, 20 bytes stay here."""
    t = Alone(folder, 1, start=start)
    t.max_blocks, me, long = 12, t.rank, 2 * CHUNK + 100
    to_first, own, from_last = pattern(1, 0, long), pattern(1, 1, 20), pattern(2, 1, 48)
    flags, data = t.expected[0]
    for number, (channel, turn) in enumerate(((0, 1), (1, 1), (0, 2))):
        piece = to_first.numpy()[number * CHUNK : (number + 1) * CHUNK]
        data[t.chunk(0, me, channel, turn, len(piece))] = piece
        flags[t.channel(ARRIVED, me, channel)] = t.count(turn)
    for channel in (0, 1):
        flags[t.header(me, channel, 1)] = np.array([long, 7], np.int64).view(np.uint32)
    t.data[me][t.chunk(me, 2, 0, 1, 48)] = from_last.numpy()
    t.flag_words[me][t.header(2, 0, 1)] = np.array([48, 7], np.int64).view(np.uint32)
    t.flag_words[me][t.channel(ARRIVED, 2, 0)] = t.count(1)
    t.expected[2][0][t.channel(ACKNOWLEDGED, me, 0)] = t.count(1)
    mine = t.flag_words[me].copy()
    mine[t.channel(SENT, 0, 0)], mine[t.channel(SENT, 0, 1)] = t.count(2), t.count(1)
    mine[t.channel(RECEIVED, 2, 0)] = t.count(1)

    sends = [Guarded.holding(data) for data in (to_first, own)]
    takes = [Guarded(20, torch.uint8), Guarded(48, torch.uint8)]
    t.kernels.exchange_table(
        t,
        [*((s.view.data_ptr(), s.view.numel()) for s in sends), (0, 0)],
        [(0, 0), *((s.view.data_ptr(), s.view.numel()) for s in takes)],
        tag=7,
    )
    takes[0].check("exchange, own", own)
    takes[1].check("exchange, received", from_last)
    t.check_peers("exchange")
    assert not t.page.any()
    assert (t.flag_words[me] == mine).all(), "own counts"


def all_checks(folder):
    for rank, start in CASES:
        for check in (one_shot, reduce_scatter, two_shot, sentinel, exchange):
            check(folder / f"{check.__name__}-{rank}", rank, start)
    return len(CASES)


def test_what_a_rank_pushes_and_publishes(interpreter, tmp_path):
    assert interpreter.alone(all_checks, tmp_path) == len(CASES)


def small_launches(folder):
    """Launches of one block when a quarter, half, … of the circle is over."""
    for kernel, rounds in (("one-shot", 1), ("two-shot", 2)):
        for start in (2**30 - 1, 2**31 - 1, 2**32 - 1):
            t = Alone(folder / f"{kernel}-{start}", start=start)
            for r in t.others:
                t.arrive(r, blocks=1, rounds=rounds)
            x = torch.ones(12)
            start_sum(t, kernel, x, x)
            for r in t.others:
                flags = t.flag_words[r][t.flag(t.rank, 0) : t.flag(t.rank, MAX_BLOCKS)]
                assert (flags == t.count(rounds)).all(), f"{kernel} from {start}: {flags}"
    return True


def test_small_launches_leave_no_flag_half_a_circle_behind(interpreter, tmp_path):
    """Flags are of a block, the sequence is of all launches. A flag that nobody has written for
    2**31 rounds would look as if it were ahead, and a block would not wait.
    """
    assert interpreter.alone(small_launches, tmp_path)
