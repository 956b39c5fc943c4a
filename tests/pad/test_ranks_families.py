"""Shards of padded models, run rank by rank as an engine does: the logits of the stock model.

The blocks are written anew (``rank_blocks``), not taken from Transformers, which computes the stock
model's logits; unpadded on one rank they are checked to be the same model.
"""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.pad import rank_blocks, rank_models, shards
from tests.pad.exact import TINY, apart, padded_copy, random_model, tail
from tp3.pad.planner import plan

ALL = (3, 5, 6, 7)
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# A family by the tiny config it has, what that lacks of the published ones, and the sizes.
FAMILIES = {
    "llama": ({}, ALL),
    "qwen2": ({}, ALL),
    "qwen3_next": ({}, ALL),
    "deepseek_v3-mtp": ({"n_group": 2, "topk_group": 1}, ALL),
    "minimax_m2": ({"rotary_dim": 6}, ALL),
    "olmoe": ({}, ALL),
    "granitemoehybrid": (
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.2,
            "logits_scaling": 2.0,
        },
        ALL,
    ),
    "gpt_oss": ({"rope_parameters": ROPE, "sliding_window": 5}, ALL),
}
# Where KV heads may be split: six query heads of two groups.
SPLIT = {
    (name, tp): ("split-group",)
    for name in ("llama", "qwen2", "qwen3_next", "minimax_m2", "olmoe", "gpt_oss")
    for tp in (3, 6)
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    name = request.param
    changes, sizes = FAMILIES[name]
    return name, random_model(name, TINY[name] | changes), sizes


def by_ranks(stock, planned, change=lambda ranks: None):
    """The logits as the ranks of a plan have them together, in fp64."""
    config = planned.padded_config(stock.config)
    weights = {name: tensor.clone() for name, tensor in padded_copy(stock, planned).items()}
    ranks = shards.Ranks(planned.tp, weights, config)
    change(ranks)
    return rank_models.logits(planned.model.model_type, ranks, stock.tokens[0])[None]


def test_the_ranks_compute_the_stock_logits(family):
    name, stock, sizes = family
    told = []
    for tp in (1, *sizes):
        done = []
        for way in ("auto",) if tp == 1 else ("append", "in-group", *SPLIT.get((name, tp), ())):
            planned = plan(stock.config, tp=tp, strategy=way)
            if planned.spreads in done:
                continue
            done.append(planned.spreads)
            ours = by_ranks(stock, planned)
            error = apart(ours, stock.exact)
            if error > stock.bound or tail(ours):
                told.append(f"TP {tp} {way}: {error:.3g} > {stock.bound:.3g}, tail {tail(ours)}")
    assert not told


def bias_on_every_rank(ranks, patch):
    for name in ranks.weights:
        if name.endswith(("o_proj.bias", "down_proj.bias")):
            ranks.weights[name] *= ranks.tp


def expert_bias_on_every_rank(ranks, patch):
    for name in ranks.weights:
        if name.endswith("down_proj_bias"):
            ranks.weights[name] *= ranks.tp


def norm_of_a_rank_alone(ranks, patch):
    right = rank_blocks.rms
    patch.setattr(rank_blocks, "rms", lambda x, weight, eps, squares=None: right(x, weight, eps))


def eps_as_trained(ranks, patch):
    del ranks.config["tp3"]


def sections_cut_as_one(ranks, patch):
    right = shards.Ranks.cut
    patch.setattr(
        shards.Ranks,
        "cut",
        lambda self, name, rank, dim=0, sections=(): (
            right(self, name, rank, dim)
            if sections and min(sections) > 0
            else right(self, name, rank, dim, sections)
        ),
    )


def kv_heads_of_another_rank(ranks, patch):
    right = shards.Ranks.heads
    patch.setattr(
        shards.Ranks,
        "heads",
        lambda self, name, rank, head_dim: right(self, name, (rank + 1) % self.tp, head_dim),
    )


def sinks_of_another_rank(ranks, patch):
    for name in ranks.weights:
        if name.endswith("sinks"):
            ranks.weights[name] = ranks.weights[name].flip(0)


def the_first_rank_is_left_out(ranks, patch):
    patch.setattr(
        shards.Ranks,
        "summed",
        lambda self, partial: sum(partial(rank) for rank in range(1, self.tp)),
    )


FAULTS = [
    ("llama", 3, bias_on_every_rank),
    ("gpt_oss", 3, expert_bias_on_every_rank),
    ("minimax_m2", 3, norm_of_a_rank_alone),
    ("minimax_m2", 3, eps_as_trained),
    ("granitemoehybrid", 3, norm_of_a_rank_alone),
    ("granitemoehybrid", 3, eps_as_trained),
    ("granitemoehybrid", 3, sections_cut_as_one),
    ("qwen3_next", 3, sections_cut_as_one),
    ("llama", 3, kv_heads_of_another_rank),
    ("llama", 6, kv_heads_of_another_rank),
    ("gpt_oss", 3, sinks_of_another_rank),
    ("deepseek_v3-mtp", 5, the_first_rank_is_left_out),
]


@pytest.mark.parametrize(("name", "tp", "fault"), FAULTS)
def test_what_ranks_do_wrong_is_seen(name, tp, fault, monkeypatch):
    stock = random_model(name, TINY[name] | FAMILIES[name][0])
    planned = plan(stock.config, tp=tp, strategy="append")
    assert apart(by_ranks(stock, planned), stock.exact) <= stock.bound
    wrong = by_ranks(stock, planned, lambda ranks: fault(ranks, monkeypatch))
    assert apart(wrong, stock.exact) > 1000 * stock.bound
