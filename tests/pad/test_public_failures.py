"""Failures that others reported, by the dimension that broke: planned right, or refused with the
dimension named.
"""

from __future__ import annotations

from math import lcm
from typing import Any

import pytest

from tests.pad.brute import CONFIGS
from tests.pad.gqa import HEADS, llama, padded
from tp3.pad.catalogue import Catalogue
from tp3.pad.corrections import eps_factors
from tp3.pad.planner import Plan, plan
from tp3.pad.spread import kept

BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
MARLIN = {"quant_method": "gptq", "bits": 4, "group_size": 32}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}


def counts(q: int, kv: int, tp: int, **more: Any) -> list[int]:
    return padded(llama(q, kv, 128, 13824, 32000, **more), tp, *HEADS)


def keeps_the_map(planned: Plan) -> bool:
    q, kv = planned.spreads["q_heads"], planned.spreads["kv_heads"]
    ratio, trained = q.padded // kv.padded, q.stock // kv.stock
    return q.padded % kv.padded == 0 and all(
        kv.sources[head // ratio] == source // trained
        for head, source in enumerate(q.sources)
        if source is not None
    )


@pytest.mark.parametrize(
    ("stock", "tp", "right"),
    [
        ((52, 52), 3, [54, 54]),
        ((52, 52), 8, [56, 56]),
        ((40, 40), 3, [42, 42]),
        ((40, 40), 5, [40, 40]),
        ((40, 40), 6, [42, 42]),
        ((32, 8), 3, [36, 9]),
        ((64, 64), 3, [66, 66]),
        ((64, 8), 3, [72, 9]),
        ((64, 8), 5, [80, 10]),
        ((64, 8), 6, [96, 12]),
        ((64, 8), 7, [112, 14]),
        ((48, 8), 3, [54, 9]),
        ((40, 10), 4, [48, 12]),
        ((25, 25), 2, [26, 26]),
        ((25, 25), 3, [27, 27]),
        ((25, 25), 6, [30, 30]),
        ((16, 2), 6, [18, 6]),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else None,
)
def test_heads_that_do_not_divide(stock: tuple[int, int], tp: int, right: list[int]) -> None:
    assert counts(*stock, tp) == right


@pytest.mark.parametrize("tp", [2, 3, 4, 6, 8])
def test_falcon_7b_71_heads_with_one_kv_head(tp: int) -> None:
    """72 on any of these; every rank reads a copy of the one KV head."""
    q, kv = counts(71, 1, tp)
    assert q == 72
    assert tp % kv == 0


@pytest.mark.parametrize("tp", [5, 7, 8, 16])
def test_12_over_2_heads_keep_their_map(tp: int) -> None:
    """Reported: 16 query heads over the same two KV heads, fluent and wrong: head 6 reads KV 0."""
    planned = plan(llama(12, 2, 128, 13824, 32000), tp=tp)
    assert keeps_the_map(planned)
    assert planned.padded_sizes["q_heads"] % tp == 0


@pytest.mark.parametrize(
    ("name", "vocab", "right"),
    [("as published", 32000, 32064), ("with its tool tokens", 32768, 32832)],
)
def test_mixtral_8x22b_whose_vocabulary_failed_at_run_time(
    name: str, vocab: int, right: int
) -> None:
    config = CONFIGS["Mixtral-8x22B-v0.1"] | {"vocab_size": vocab}
    assert padded(config, 3, *HEADS, "vocab") == [54, 9, right]


@pytest.mark.parametrize("tp", [3, 5, 6, 7])
@pytest.mark.parametrize("vocab", [49954, 50432, 30003, 128167, 151552, 250682, 129280, 32064])
def test_vocabularies(vocab: int, tp: int) -> None:
    (size,) = padded(llama(32, 8, 128, 13824, vocab), tp, "vocab")
    assert size % lcm(64, tp) == 0
    assert vocab <= size < vocab + lcm(64, tp)


def test_phi_3_medium() -> None:
    config = llama(40, 10, 128, 17920, 32064, model_type="phi3")
    assert padded(config, 4, *HEADS) == [48, 12]
    assert padded(config, 5, "vocab") == [32320]


def test_fp8_experts_of_1536_on_eight_ranks() -> None:
    """192 columns cut a block of 128."""
    assert padded(CONFIGS["MiniMax-M2.5"], 8, "moe_intermediate") == [2048]
    assert padded(CONFIGS["Qwen3-235B-A22B-FP8"], 8, "moe_intermediate") == [2048]


def test_fp8_latent_heads_whose_2112_rows_cut_a_block() -> None:
    """66 heads on six ranks: 11 of 192 rows; 72: 18 whole blocks."""
    (heads,) = padded(CONFIGS["Kimi-K2-Instruct"], 6, "q_heads")
    assert (heads, heads // 6 * 192 % 128) == (72, 0)


def test_fp8_blocks_over_one_kv_head_of_64() -> None:
    """One head's 64 rows are half a block: a rank gets two."""
    config = llama(32, 8, 64, 14336, 32000, quantization_config=BLOCKS)
    assert padded(config, 8, *HEADS) == [64, 16]


@pytest.mark.parametrize(("tp", "width"), [(2, 29696), (4, 29696)])
def test_awq_29568_has_231_groups(tp: int, width: int) -> None:
    config = llama(64, 8, 128, 29568, 32000, quantization_config=AWQ)
    assert padded(config, tp, "intermediate") == [width]


@pytest.mark.parametrize("tp", [2, 3, 4])
@pytest.mark.parametrize("width", [10944, 7392])
def test_marlin(width: int, tp: int) -> None:
    (size,) = padded(
        llama(32, 8, 128, width, 32000, quantization_config=MARLIN), tp, "intermediate"
    )
    assert size // tp % 64 == 0
    assert size // tp % 128 == 0
    assert size - width < tp * 128


def test_nvfp4_1856_on_eight_ranks() -> None:
    """232 columns cut a group of 16."""
    config = llama(32, 8, 128, 1856, 32000, quantization_config=NVFP4)
    assert padded(config, 8, "intermediate") == [1920]


@pytest.mark.parametrize("heads", [16, 25])
def test_vision_towers_stay_whole_and_are_told_of(heads: int) -> None:
    config = CONFIGS["Qwen3.5-27B"]
    config = config | {"vision_config": config["vision_config"] | {"num_heads": heads}}
    planned = plan(config, tp=3)
    assert f"{heads} heads" in planned.notes[0]
    assert "data-parallel" in planned.notes[0]
    entry = Catalogue(planned).entry(
        "model.visual.blocks.0.attn.qkv.weight", (3 * heads * 72, 1152), "BF16"
    )
    assert entry.inert


def test_minimax_with_8_kv_heads_on_16_ranks() -> None:
    """Reported: one token for ever. Two ranks to a KV head cut the norm over all heads elsewhere
    than the heads: every rank gets a copy of its own, of which the norm counts the same.
    """
    planned = plan(CONFIGS["MiniMax-M2.5"], tp=16)
    assert [planned.padded_sizes[axis] for axis in HEADS] == [48, 16]
    assert keeps_the_map(planned)
    assert eps_factors(planned.model, planned.spreads) == {}
    alike = llama(48, 8, 128, 1536 * 16, 200064)
    assert padded(alike, 16, *HEADS) == [48, 8]  # without such a norm engines share the heads


def test_a_size_that_divides_the_query_heads_alone() -> None:
    """Reported: a scheduler took three ranks because 48 % 3 == 0; then 8 KV heads failed."""
    for axis in plan(CONFIGS["Mixtral-8x22B-v0.1"], tp=3).axes:
        assert axis.per_rank * 3 == axis.padded, axis


def test_a_model_without_a_plan_names_the_dimension() -> None:
    with pytest.raises(ValueError, match="71/1 heads to 3 ranks"):
        plan(llama(71, 1, 128, 13824, 32000), tp=3, strategy="split-group")


def test_16_over_2_heads_appended_share_kv_heads_between_ranks() -> None:
    """24/3 on six ranks: rank r holds KV head r // 2 and query heads 4r to 4r + 3, as engines deal
    them. Each reads its trained KV head, and a rank caches one head, as it would of 48/6.
    """
    planned = plan(llama(16, 2, 128, 13824, 32000), tp=6, strategy="append")
    q, kv = planned.spreads["q_heads"], planned.spreads["kv_heads"]
    assert (q.padded, kv.padded) == (24, 3)
    replicas, local = 6 // kv.padded, q.padded // 6
    for rank in range(6):
        held = kv.sources[rank // replicas]
        for source in q.sources[rank * local : (rank + 1) * local]:
            assert (held is None) if source is None else (held == source // 8)
    wider = plan(llama(48, 6, 128, 13824, 32000), tp=6)
    assert wider.spreads["kv_heads"] == kept(6)
    assert planned.ledger.kv_bytes_per_token == wider.ledger.kv_bytes_per_token
    assert planned.ledger.weight_bytes < wider.ledger.weight_bytes
