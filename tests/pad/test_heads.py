"""The three ways to pad heads: map kept, ranks whole, no smaller one; and published counts."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tp3.pad.heads import STRATEGIES, Heads, candidates, serves
from tp3.pad.spread import appended, kept

GROUPS = st.tuples(st.integers(1, 12), st.integers(1, 10))  # KV heads, query heads per KV head
TP = st.integers(1, 8)


def ways(q, kv, tp):
    return {heads.strategy: heads for heads in candidates(q, kv, tp)}


@given(GROUPS, TP)
def test_every_query_head_keeps_its_keys_on_its_own_rank(groups, tp):
    kv, ratio = groups
    for heads in candidates(kv * ratio, kv, tp):
        q_sources, kv_sources = heads.q.sources, heads.kv.sources
        assert sorted(s for s in q_sources if s is not None) == list(range(kv * ratio))
        assert {s for s in kv_sources if s is not None} == set(range(kv))
        q_local = len(q_sources) // tp
        for head, source in enumerate(q_sources):
            # an engine with fewer KV heads than ranks gives each rank the one of its queries
            rank = head // q_local
            held = range(rank * len(kv_sources) // tp, -(-(rank + 1) * len(kv_sources) // tp))
            assert head // heads.ratio in held
            assert source is None or kv_sources[head // heads.ratio] == source // ratio


@given(GROUPS, TP)
def test_every_way_serves_its_ranks(groups, tp):
    kv, ratio = groups
    for heads in candidates(kv * ratio, kv, tp):
        assert serves(heads.q.padded, heads.kv.padded, tp)


@given(GROUPS, TP)
def test_append_is_the_smallest_of_whole_groups(groups, tp):
    kv, ratio = groups
    least = next(n for n in range(kv, kv + tp + 1) if serves(n * ratio, n, tp))
    assert ways(kv * ratio, kv, tp)["append"].kv == appended(kv, least)


@given(GROUPS, TP)
def test_split_group_is_the_fewest_copies_that_divide_the_ratio(groups, tp):
    kv, ratio = groups
    least = next(
        (r for r in range(2, ratio + 1) if ratio % r == 0 and serves(kv * ratio, kv * r, tp)), None
    )
    found = ways(kv * ratio, kv, tp).get("split-group")
    assert (found is None) == (least is None)
    if found and least:
        assert found.q == kept(kv * ratio)
        assert found.kv.padded == kv * least


@given(st.tuples(st.integers(1, 4), st.integers(2, 9)), st.integers(2, 7))
def test_in_group_has_the_fewest_query_heads(groups, tp):
    """Against every number of copies, places in a copy, and dummy KV heads, where the cache is no
    larger than append's, else where it may be.
    """
    kv, ratio = groups
    both = ways(kv * ratio, kv, tp)
    found = both.get("in-group")
    assume(found is not None)
    sizes = [
        (padded_kv > tp * both["append"].kv_per_rank(tp), padded_kv * local)
        for local in range(1, ratio)
        for padded_kv in range(2 * kv, kv * ratio + tp)
        if padded_kv >= kv * -(-ratio // local) and serves(padded_kv * local, padded_kv, tp)
    ]
    assert found.q.padded == min(sizes)[1]


@given(GROUPS, TP)
def test_padding_twice_changes_nothing(groups, tp):
    kv, ratio = groups
    once = ways(kv * ratio, kv, tp)["append"]
    assert ways(once.q.padded, once.kv.padded, tp)["append"].inert


@pytest.mark.parametrize(
    ("model", "strategy", "stock", "tp", "padded"),
    [
        ("llama-70b", "append", (64, 8), 3, (72, 9)),
        ("llama-70b", "append", (64, 8), 5, (80, 10)),
        ("llama-70b", "append", (64, 8), 6, (96, 12)),
        ("llama-70b", "append", (64, 8), 7, (112, 14)),
        ("52-heads", "append", (52, 52), 3, (54, 54)),
        ("52-heads", "append", (52, 52), 8, (56, 56)),
        ("40-heads", "append", (40, 40), 6, (42, 42)),
        ("mixtral-8x22b", "append", (48, 8), 3, (54, 9)),
        ("phi-3-medium", "append", (40, 10), 4, (48, 12)),
        ("gpt2-xl", "append", (25, 25), 2, (26, 26)),
        ("gpt2-xl", "append", (25, 25), 7, (28, 28)),
        ("qwen3.5-27b", "append", (24, 4), 3, (36, 6)),
        ("smollm2-135m", "append", (9, 3), 3, (9, 3)),
        ("16-2-heads", "in-group", (16, 2), 6, (18, 6)),
        ("16-2-heads", "append", (16, 2), 6, (24, 3)),
        ("16-2-heads", "in-group", (16, 2), 5, (20, 5)),
        ("32-2-heads", "in-group", (32, 2), 7, (42, 7)),
        ("qwen3.5-27b", "split-group", (24, 4), 3, (24, 12)),
    ],
)
def test_published_head_counts(model, strategy, stock, tp, padded):
    heads = ways(*stock, tp)[strategy]
    assert (heads.q.padded, heads.kv.padded) == padded


def test_a_constraint_is_met_by_the_next_size():
    found = next(candidates(64, 8, 3, fits=lambda heads: heads.q.padded // 3 % 32 == 0))
    assert (found.strategy, found.q.padded) == ("append", 96)


def test_heads_without_a_ratio_are_refused():
    with pytest.raises(ValueError, match="multiple of KV heads, got 12 and 5"):
        list(candidates(12, 5, 3))
    with pytest.raises(ValueError, match="multiple of KV heads, got 12 and 5"):
        Heads("append", kept(12), kept(5))


def test_control_a_broken_map_is_an_assertion():
    """Query heads widened without their groups: fluent nonsense elsewhere."""
    with pytest.raises(AssertionError, match="the map would break"):
        Heads("append", appended(12, 16), kept(2))


def test_strategies_are_tried_in_order():
    assert [heads.strategy for heads in candidates(24, 4, 3)] == list(STRATEGIES)
