"""Regions, slots, flags and rings lie apart and in order, at every world size and budget."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tp3.comm.layout import (
    FRAME_BYTES,
    LINE_BYTES,
    PAGE_BYTES,
    REASON_BYTES,
    SEQUENCE_MASK,
    SIGNATURE_BYTES,
    HostLayout,
    peers,
    reached,
    region_index,
    split,
)

WORLD_SIZES = st.integers(1, 24)
WORDS = st.integers(0, SEQUENCE_MASK)
PAGES = st.integers(1, 64).map(lambda pages: pages * PAGE_BYTES)
LAYOUTS = st.builds(HostLayout, WORLD_SIZES, PAGES, PAGES)


def stretches(layout):
    """``(start, stop, name)`` of everything that lies in the segment."""
    ranks = range(layout.world_size)
    for rank in ranks:
        yield layout.flag(rank), LINE_BYTES, f"flag {rank}"
        yield layout.status(rank), LINE_BYTES + REASON_BYTES, f"status {rank}"
        for slot in (0, 1):
            nbytes = SIGNATURE_BYTES + 16 * layout.world_size
            yield layout.header(rank, slot), nbytes, f"header {rank}/{slot}"
            yield layout.slot(rank, slot), layout.slot_bytes, f"slot {rank}/{slot}"
    for sender, receiver in itertools.permutations(ranks, 2):
        name = f"{sender} to {receiver}"
        yield layout.ring_counters(sender, receiver), 2 * LINE_BYTES, f"counters {name}"
        yield layout.ring(sender, receiver), layout.ring_bytes, f"ring {name}"


@given(LAYOUTS)
def test_nothing_overlaps_and_all_of_it_is_inside(layout):
    lying = sorted((start, start + nbytes, name) for start, nbytes, name in stretches(layout))
    assert lying[0][0] == 0
    assert lying[-1][1] <= layout.total_bytes
    for (_, stop, name), (start, _, after) in itertools.pairwise(lying):
        assert stop <= start, f"{name} ends at {stop}, {after} starts at {start}"


@given(LAYOUTS)
def test_what_two_ranks_write_never_shares_a_cache_line(layout):
    for start, _, name in stretches(layout):
        assert start % LINE_BYTES == 0, f"{name} starts at {start}"
        if name.startswith(("slot", "ring")):
            assert start % PAGE_BYTES == 0, f"{name} starts at {start}"


@given(LAYOUTS)
def test_a_frame_never_wraps_in_its_ring(layout):
    assert layout.ring_bytes % FRAME_BYTES == 0


@given(WORLD_SIZES)
def test_a_group_starts_small(world_size):
    layout = HostLayout.small(world_size)
    channels = world_size * (world_size - 1)
    data = 2 * world_size * layout.slot_bytes + channels * layout.ring_bytes
    assert data <= world_size * (128 << 10) + max(512 << 10, channels * PAGE_BYTES)
    # Beside the data: lines, headers and reasons of ranks, lines of channels.
    most = world_size * (3 * LINE_BYTES + REASON_BYTES + 2 * layout.header_bytes)
    assert layout.total_bytes - data <= most + channels * 2 * LINE_BYTES + PAGE_BYTES


@given(WORDS, st.integers(0, 1000))
def test_a_flag_reaches_what_it_has_passed(sequence, ahead):
    assert reached((sequence + ahead) & SEQUENCE_MASK, sequence)
    assert reached(sequence, (sequence + ahead) & SEQUENCE_MASK) == (ahead == 0)


@pytest.mark.parametrize(
    ("seen", "sequence", "expected"),
    [
        (0, 0, True),
        (0, SEQUENCE_MASK, True),
        (SEQUENCE_MASK, 0, False),
        (1, SEQUENCE_MASK - 1, True),
        (SEQUENCE_MASK - 1, 1, False),
        (0x7FFF_FFFF, 0x8000_0000, False),
        (0x8000_0000, 0x7FFF_FFFF, True),
    ],
    ids=hex,
)
def test_reached_across_the_wrap(seen, sequence, expected):
    assert reached(seen, sequence) is expected


@given(WORDS)
def test_parity_alternates_across_the_wrap(sequence):
    assert ((sequence + 1) & SEQUENCE_MASK) & 1 != sequence & 1


@given(st.integers(1, 24))
def test_senders_fill_the_regions_of_a_receiver_in_rank_order(world_size):
    for receiver in range(world_size):
        senders = peers(receiver, world_size)
        assert [region_index(sender, receiver) for sender in senders] == [*range(world_size - 1)]
        assert receiver not in senders
        assert list(senders) == sorted(senders)


@given(st.integers(0, 1 << 24), st.integers(1, 24), st.sampled_from([1, 16, 64]))
def test_split_covers_everything_once_in_rank_order(numel, world_size, align):
    sizes = split(numel, world_size, align=align)
    starts = [0, *itertools.accumulate(sizes)]
    assert len(sizes) == world_size
    assert min(sizes) >= 0
    assert starts[-1] == numel
    assert all(start % align == 0 or start == numel for start in starts)
    assert max(sizes) < -(-numel // world_size) + align


@pytest.mark.parametrize(
    ("world_size", "slot_bytes", "ring_bytes", "sentence"),
    [
        (0, PAGE_BYTES, PAGE_BYTES, "world_size is 0; it must be at least 1"),
        (2, 100, PAGE_BYTES, f"slot_bytes is 100; it must be a positive multiple of {PAGE_BYTES}"),
        (2, PAGE_BYTES, 0, f"ring_bytes is 0; it must be a positive multiple of {PAGE_BYTES}"),
    ],
)
def test_bad_input(world_size, slot_bytes, ring_bytes, sentence):
    with pytest.raises(ValueError, match=sentence):
        HostLayout(world_size, slot_bytes, ring_bytes)
