"""Negative controls: each guard of the protocol once on and once broken, in a case that needs it.

One process; the peers are played. What is broken: a constant, a helper's name in a kernel's module,
or a line of a kernel's source.
"""

import importlib.util
import re
from contextlib import contextmanager, nullcontext
from importlib import import_module
from pathlib import Path

import numpy as np
import torch

from tests.kernels.alone import ACKNOWLEDGED, ARRIVED, CHUNK, Alone, bytes_of
from tests.kernels.interpreted import TILE_BYTES, device_kernels, start_sum
from tests.kernels.sums import held, inputs, reduced
from tests.kernels.test_protocol import pattern

NUMEL = TILE_BYTES // 4
SHORT_SECONDS = 0.01
RIGHT, WRONG, TIMED_OUT, MISMATCH = "right", "wrong", "timed out", "mismatch"


@contextmanager
def replaced(module, name, value):
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield before
    finally:
        setattr(module, name, before)


def module_of(name):
    return import_module(f"tp3.kernels.{name}")


def with_constants(t, **changes):
    """Kernels are made with other constants."""
    make = t.kernels.Kept
    return replaced(t.kernels, "Kept", lambda k, c, **more: make(k, {**c, **changes}, **more))


def with_line(folder, name, old, new):
    """The kernel of a module whose source has ``new`` for the one match of ``old``."""
    text, count = re.subn(old, new, Path(module_of(name).__file__).read_text())
    assert count == 1, f"{name}.py matches {old!r} {count} times: where has the guard gone?"
    path = folder / f"{name}_broken.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return replaced(device_kernels(), f"{name}_kernel", getattr(module, f"{name}_kernel"))


def verdict(t, got=None, want=None):
    if t.page[1]:
        return {1: TIMED_OUT, 2: MISMATCH}[int(t.page[1])]
    return RIGHT if torch.equal(got, want) else WRONG


def two_slots(folder, broken):
    """The peer is one round ahead: it has seen our flag and pushes its next message before we read
    this one. Both slots coincide when a slot has no bytes (W=2).
    """
    t = Alone(folder, 0, 2)
    first, second = pattern(1, 0, TILE_BYTES), pattern(1, 0, TILE_BYTES, 1)
    one_shot = module_of("one_shot")
    t.data[0][t.slot(0, 1, 1)][:TILE_BYTES] = first.numpy()
    t.arrive(1, blocks=1, rounds=1)

    def peer_goes_on(*args):
        assert t.flag_words[1][t.flag(0, 0)] == 1, "it may not before"
        place = t.slot(0, 1, 2)
        t.data[0][slice(0, TILE_BYTES) if broken else place][:TILE_BYTES] = second.numpy()
        t.arrive(1, blocks=1, rounds=2)
        return summed(*args)

    x = torch.zeros(TILE_BYTES, dtype=torch.uint8)
    breaking = with_constants(t, SLOT_BYTES=0) if broken else nullcontext()
    with replaced(one_shot, "summed", peer_goes_on) as summed, breaking:
        start_sum(t, "one-shot", x, x)
    return verdict(t, x, first)


def rank_order(folder, broken):
    t = Alone(folder)
    rounds, one_shot = module_of("rounds"), module_of("one_shot")
    arrays = inputs(torch.float32, "SUM", 3, NUMEL)
    for r in t.others:
        t.data[1][t.slot(1, r, 1)][:TILE_BYTES] = bytes_of(held(arrays[r], torch.float32))
        t.arrive(r, blocks=1, rounds=1)

    def from_own(own, inside, place, data, slot, op, dtype, rank, world_size, size):
        total = own
        for step in (1, 2):
            r = (t.rank + step) % 3
            total += rounds.pulled(inside, place, data, slot, dtype, r, rank, size)
        return total

    x = held(arrays[1], torch.float32)
    with replaced(one_shot, "summed", from_own) if broken else nullcontext():
        start_sum(t, "one-shot", x, x)
    return verdict(t, x, held(reduced(torch.float32, "SUM", arrays), torch.float32))


def every_copy_of_the_sequence(folder, broken):
    """A launch of one block, then one of two: block 1 reads a copy that block 0 wrote."""
    t = Alone(folder, 0, 2)
    rounds, tl = module_of("rounds"), import_module("triton.language")
    t.arrive(1, blocks=2, rounds=2)

    def own_copy(flags, offset, most, value):
        pointer = rounds.words_at(flags, offset) + tl.program_id(0)
        tl.store(pointer, value)

    x = torch.zeros(2 * NUMEL)
    with replaced(rounds, "advance", own_copy) if broken else nullcontext():
        start_sum(t, "one-shot", x[:NUMEL], x[:NUMEL])
        start_sum(t, "one-shot", x, x)
    published = [int(t.flag_words[1][t.flag(0, block)]) for block in (0, 1)]
    return RIGHT if published == [2, 2] else WRONG


def waiting(folder, broken):
    """The peer does not come."""
    t = Alone(folder, 0, 2)
    t.limit_seconds = SHORT_SECONDS
    x = torch.zeros(NUMEL)
    with replaced(module_of("rounds"), "wait", lambda *_: 1) if broken else nullcontext():
        start_sum(t, "one-shot", x, x)
    return verdict(t, x, torch.ones(NUMEL))


def ones_from_the_start(folder, broken):
    """The peer does not come, and its slots were never filled with ones."""
    t = Alone(folder, 0, 2)
    t.limit_seconds = SHORT_SECONDS
    if broken:
        t.data[0][t.layout.sentinels : t.layout.rings] = 0
    x = torch.zeros(NUMEL)
    start_sum(t, "sentinel", x, x)
    return verdict(t, x, torch.ones(NUMEL))


def ones_put_back(folder, broken):
    """The peer comes to two launches and not to the third, which uses the first one's slot."""
    t = Alone(folder, 0, 2)
    for launch in (1, 2):
        t.data[0][t.slot(0, 1, launch, sentinel=True)][:TILE_BYTES] = 0
    x, line = torch.zeros(NUMEL), r"tl.store\(\w+, tl.full\(\[TILE\], -1, BITS\), inside\)"
    with with_line(folder, "sentinel", line, "pass") if broken else nullcontext():
        for _ in range(2):
            start_sum(t, "sentinel", x, x)
        assert not t.page[1]
        t.limit_seconds = SHORT_SECONDS
        start_sum(t, "sentinel", x, x)
    return verdict(t, x, torch.ones(NUMEL))


def own_ones_replaced(folder, broken):
    """A message that holds the sentinel: the peer waits for it for ever."""
    t = Alone(folder, 0, 2)
    t.data[0][t.slot(0, 1, 1, sentinel=True)][:TILE_BYTES] = 0
    x = torch.full((NUMEL,), -1, dtype=torch.int32).view(torch.float32)
    with with_constants(t, NAN=-1) if broken else nullcontext():
        start_sum(t, "sentinel", x, x)
    pushed = t.data[1][t.slot(1, 0, 1, sentinel=True)][:TILE_BYTES].view(np.float32)
    assert np.isnan(pushed).all()
    return WRONG if (pushed.view(np.int32) == -1).any() else RIGHT


def acknowledged(folder, broken):
    """The receiver has read nothing: the third chunk may not replace the first in its ring."""
    t = Alone(folder, 0, 2)
    t.max_blocks, t.limit_seconds = 2, SHORT_SECONDS
    data = pattern(0, 1, 3 * CHUNK)
    here = t.kernels.Strided(data.data_ptr())
    with replaced(module_of("exchange"), "wait", lambda *_: 1) if broken else nullcontext():
        t.kernels.exchange(t, sources=here, num_bytes=3 * CHUNK, lanes=(1, 1))
    assert t.flag_words[1][t.channel(ARRIVED, 0, 0)] == (3 if broken else 2)
    assert t.flag_words[0][t.channel(ACKNOWLEDGED, 1, 0)] == 0
    ring = torch.from_numpy(t.data[1][t.chunk(1, 0, 0, 1, CHUNK)].copy())
    return verdict(t, ring, data[:CHUNK])


def header(folder, broken):
    """The peer sends 64 bytes where 48 are expected."""
    t = Alone(folder, 0, 2)
    t.data[0][t.chunk(0, 1, 0, 1, 64)] = 7
    t.flag_words[0][t.header(1, 0, 1)] = np.array([64, 0], np.int64).view(np.uint32)
    t.flag_words[0][t.channel(ARRIVED, 1, 0)] = 1
    out = torch.zeros(48, dtype=torch.uint8)
    check = r"if \(theirs != count\) \| \(label != tag\):"
    with with_line(folder, "exchange", check, "if theirs < 0:") if broken else nullcontext():
        here = t.kernels.Strided(out.data_ptr())
        t.kernels.exchange(t, targets=here, num_bytes=48, lanes=(3, 1))
    return verdict(t, out, torch.zeros_like(out))


OUTCOMES = {  # with the guard, without
    two_slots: (RIGHT, WRONG),
    rank_order: (RIGHT, WRONG),
    every_copy_of_the_sequence: (RIGHT, WRONG),
    waiting: (TIMED_OUT, WRONG),
    ones_from_the_start: (TIMED_OUT, WRONG),
    ones_put_back: (TIMED_OUT, WRONG),
    own_ones_replaced: (RIGHT, WRONG),
    acknowledged: (TIMED_OUT, WRONG),
    header: (MISMATCH, WRONG),
}


def all_controls(folder):
    return {
        control.__name__: tuple(
            control(folder / f"{control.__name__}-{broken}", broken) for broken in (False, True)
        )
        for control in OUTCOMES
    }


def test_each_guard_is_needed(interpreter, tmp_path):
    got = interpreter.alone(all_controls, tmp_path)
    assert got == {control.__name__: outcome for control, outcome in OUTCOMES.items()}
