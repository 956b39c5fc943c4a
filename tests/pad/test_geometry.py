"""The arithmetic: minimal, divisible, ratio-preserving, right where public reports went wrong."""

from math import lcm

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tp3.pad.geometry import Heads, append_heads, pad_vocab, pad_width

TP = st.integers(1, 16)
GROUPS = st.tuples(st.integers(1, 64), st.integers(1, 24))  # KV heads, query heads per KV head


@given(GROUPS, TP)
def test_heads_are_the_smallest_whole_groups_that_divide(groups, tp):
    kv, ratio = groups
    padded = append_heads(kv * ratio, kv, tp=tp)
    fits = (n for n in range(kv, kv * ratio * tp + 1) if n % tp == 0 and n * ratio % tp == 0)
    assert padded == Heads(next(fits) * ratio, padded.kv)
    assert padded.ratio == ratio


@given(GROUPS, TP)
def test_heads_keep_the_trained_map_on_every_rank(groups, tp):
    kv, ratio = groups
    padded = append_heads(kv * ratio, kv, tp=tp)
    assert padded.kv_of_q[: kv * ratio] == Heads(kv * ratio, kv).kv_of_q
    q_local, kv_local = padded.q // tp, padded.kv // tp
    for head, group in enumerate(padded.kv_of_q):
        assert head // q_local == group // kv_local, f"head {head} reads a group of another rank"


@given(st.integers(1, 5000), TP, st.sampled_from([1, 16, 32, 64, 128]))
def test_width_is_the_smallest_of_whole_local_blocks(size, tp, block):
    padded = pad_width(size, tp=tp, local_multiple=block)
    assert padded == next(n for n in range(size, size + tp * block) if n % (tp * block) == 0)


@given(st.integers(1, 300_000), st.integers(2, 16))
def test_vocabulary_is_the_smallest_multiple_of_64_and_tp(size, tp):
    padded = pad_vocab(size, tp=tp)
    assert padded % 64 == padded % tp == 0
    assert 0 <= padded - size < lcm(64, tp)


@given(GROUPS, TP)
def test_padding_twice_changes_nothing(groups, tp):
    kv, ratio = groups
    once = append_heads(kv * ratio, kv, tp=tp)
    assert append_heads(once.q, once.kv, tp=tp) == once
    assert pad_vocab(pad_vocab(kv, tp=tp), tp=tp) == pad_vocab(kv, tp=tp)


@pytest.mark.parametrize(
    ("model", "q", "kv", "tp", "padded"),
    [
        ("llama-70b", 64, 8, 3, Heads(72, 9)),
        ("llama-70b", 64, 8, 5, Heads(80, 10)),
        ("llama-70b", 64, 8, 6, Heads(96, 12)),
        ("llama-70b", 64, 8, 7, Heads(112, 14)),
        ("52-heads", 52, 52, 3, Heads(54, 54)),
        ("52-heads", 52, 52, 8, Heads(56, 56)),
        ("40-heads", 40, 40, 3, Heads(42, 42)),
        ("40-heads", 40, 40, 6, Heads(42, 42)),
        ("32-8-heads", 32, 8, 3, Heads(36, 9)),
        ("mixtral-8x22b", 48, 8, 3, Heads(54, 9)),
        ("phi-3-medium", 40, 10, 4, Heads(48, 12)),
        ("gpt2-xl", 25, 25, 2, Heads(26, 26)),
        ("smollm2-135m", 9, 3, 2, Heads(12, 4)),
        ("smollm2-135m", 9, 3, 3, Heads(9, 3)),
    ],
)
def test_published_head_counts(model, q, kv, tp, padded):
    assert append_heads(q, kv, tp=tp) == padded


@pytest.mark.parametrize(
    ("size", "tp", "padded"),
    [
        (32768, 3, 32832),
        (128256, 3, 128256),
        (151552, 3, 151680),
        (129280, 3, 129408),
        (154880, 3, 154944),
        (248320, 3, 248448),
        (49954, 5, 50240),
        (50432, 7, 50624),
        (30003, 3, 30144),
        (128167, 6, 128256),
        (250682, 7, 250880),
        (30003, 1, 30003),
    ],
)
def test_published_vocabularies(size, tp, padded):
    assert pad_vocab(size, tp=tp) == padded


@pytest.mark.parametrize(
    ("size", "block", "padded"), [(17408, 64, 17472), (17408, 128, 17664), (28672, 1, 28674)]
)
def test_published_widths_at_three_ranks(size, block, padded):
    assert pad_width(size, tp=3, local_multiple=block) == padded


def test_heads_without_a_ratio_are_refused():
    with pytest.raises(ValueError, match="multiple of KV heads, got 12 and 5"):
        append_heads(12, 5, tp=3)


@pytest.mark.parametrize("tp", [0, -3])
def test_an_impossible_number_of_ranks_is_refused(tp):
    with pytest.raises(ValueError, match=f"tp must be at least 1, got {tp}"):
        pad_width(64, tp=tp)
