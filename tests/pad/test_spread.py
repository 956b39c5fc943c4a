"""Spreads against their sources written out: sections, units, blocks; and extents built of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tp3.pad.extent import sections, spread_of
from tp3.pad.spread import Spread, appended, joined, kept, picked

SPREADS = st.integers(1, 12).flatmap(
    lambda stock: st.lists(st.none() | st.integers(0, stock - 1), min_size=1, max_size=20).map(
        lambda sources: picked(stock, sources)
    )
)


@given(st.integers(1, 9), st.lists(st.none() | st.integers(0, 8), min_size=1, max_size=20))
def test_a_spread_is_its_sources(stock, sources):
    sources = [None if source is None else source % stock for source in sources]
    spread = picked(stock, sources)
    assert spread.sources == tuple(sources)
    assert spread.padded == len(sources)
    assert spread.inert == (sources == list(range(stock)))
    real = sources[:stock]
    assert spread.appends == (
        real == [*range(stock)] and not any(source is not None for source in sources[stock:])
    )


@given(SPREADS, st.integers(1, 5))
def test_entries_follow_their_units(spread, unit):
    want = [
        None if source is None else source * unit + at
        for source in spread.sources
        for at in range(unit)
    ]
    assert spread.scaled(unit).sources == tuple(want)


@given(st.lists(SPREADS, min_size=1, max_size=4))
def test_sections_pad_in_place(parts):
    want, offset = [], 0
    for part in parts:
        want += [None if source is None else source + offset for source in part.sources]
        offset += part.stock
    assert joined(parts).sources == tuple(want)
    assert joined(parts).stock == offset


@given(SPREADS, st.integers(1, 6), st.integers(1, 6))
def test_whole_blocks_move_as_one(spread, unit, block):
    """Where an answer is given, each padded block is whole and copies one trained block."""
    wide = spread.scaled(unit)
    blocks = wide.in_blocks(block)
    if unit % block == 0:
        assert blocks is not None
    if blocks is None:
        return
    assert blocks.padded == -(-wide.padded // block)
    for place, source in enumerate(blocks.sources):
        entries = wide.sources[place * block : (place + 1) * block]
        trained = [entry for entry in entries if entry is not None]
        assert {entry // block for entry in trained} == ({source} if trained else set())
        for at, entry in enumerate(entries):
            assert entry is None or entry % block == at


def test_a_block_that_two_runs_share_is_no_block():
    assert joined([appended(6, 8), kept(4)]).in_blocks(4) is None
    assert appended(6, 12).in_blocks(4) == appended(2, 3)
    assert picked(4, [0, 1, None, 2, 3, None]).in_blocks(2) is None


def test_a_spread_needs_units():
    with pytest.raises(ValueError, match="at least one unit, got 0"):
        Spread(0, ((None, 1),))


SIZES = {"hidden": 10, "head_dim": 2}
AXES = {"q": appended(4, 6), "kv": appended(2, 3)}


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("hidden", kept(10)),
        ("3", kept(3)),
        ("q*head_dim", appended(8, 12)),
        ("2*hidden", kept(20)),
        ("q*2*head_dim", appended(16, 24)),
        ("q*head_dim + 2*kv", Spread(12, ((0, 8), (None, 4), (8, 4), (None, 2)))),
        ("kv+kv", Spread(4, ((0, 2), (None, 1), (2, 2), (None, 1)))),
    ],
)
def test_extents(text, want):
    assert spread_of(text, SIZES, AXES) == want


def test_an_extent_of_an_unknown_name_is_an_error_of_ours():
    with pytest.raises(KeyError, match="depth"):
        sections("depth*2", SIZES, AXES)
