"""What a wrong rule does to the logits: each kind of rule broken once, and it must be seen.

A dummy head or column is guarded twice, by what feeds it and by what reads it, so that one fill
that is not zero changes nothing; both are. Those rows say why, and are held to the same bound.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache
from math import inf, nan

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.pad.breaks import (  # noqa: E402
    Break,
    backwards,
    copies_for_zeros,
    filled,
    in_sections,
    moved,
    once,
    other_copies,
    uncorrected,
    zeros_first,
    zeros_last,
)
from tests.pad.exact import (  # noqa: E402
    ASKED,
    RUN,
    TINY,
    apart,
    padded_logits,
    stock_model,
    tail,
)
from tp3.pad.extent import sections  # noqa: E402
from tp3.pad.needs import names_of  # noqa: E402
from tp3.pad.planner import plan  # noqa: E402

CLEAR = 1000  # bounds; what the rows below do is a billion and more


@dataclass(frozen=True)
class Wrong:
    """A rule broken. tensors: what is done to the entries of a pattern. harmless: why it changes
    nothing, where it does not. eps: whether norms get their eps.
    """

    family: str
    what: str
    tensors: dict[str, Break] = field(default_factory=dict)
    way: str = "append"
    tp: int = 3
    harmless: str = ""
    eps: bool = True


HALF = filled(0.5)
UNREAD = "no column of the next projection reads it"
UNFED = "what it multiplies is 0"
CORRECTED = {"minimax_m2": "[qk]_norm", "olmo2": "[qk]_norm", "granitemoehybrid": "mamba.norm"}
MAPS = (
    Wrong("qwen3", "KV heads after the dummy one", {"[kv]_proj": zeros_first(0)}),
    Wrong("qwen3", "query heads after the dummy ones", {"q_proj": zeros_first(0)}),
    Wrong("qwen3", "columns of o_proj after the dummy ones", {"o_proj": zeros_first(1)}),
    Wrong("qwen3", "copies 0 1 0 1", {"[kv]_proj": other_copies(0, 12, 2)}, "in-group", 4),
    Wrong("qwen3", "copies 0 1 …", {"[kv]_proj": other_copies(0, 12, 3)}, "split-group"),
    Wrong("qwen3", "no copies, zeros", {"[kv]_proj": once(0)}, "in-group", 4),
    Wrong("qwen3", "copies, not zeros", {"[kv]_proj": copies_for_zeros(0)}, harmless=UNREAD),
    Wrong("minimax_m2", "copies in a norm", {"k_proj": copies_for_zeros(0)}),
    Wrong("qwen3", "no copies, zeros", {"[kv]_proj": once(0)}, "split-group"),
    Wrong("qwen2", "biases not copied", {"[kv]_proj.bias": once(0)}, "in-group", 4),
    Wrong(
        "qwen3",
        "query heads padded alone, at the end",
        {"q_proj": zeros_last(0), "o_proj": zeros_last(1)},
        "in-group",
        4,
    ),
    Wrong("gpt_oss", "sinks padded at the end", {"sinks": zeros_last(0)}, "in-group", 4),
    Wrong(
        "step3p7", "gates padded at the end", {r"layers\.0.*g_proj": zeros_last(0)}, "in-group", 4
    ),
    Wrong("minimax_m3_vl", "indexer not copied", {"index_q_proj": once(0)}, "in-group", 4),
    Wrong("gpt_oss", "router's experts", {"router.weight": backwards(0)}),
    Wrong("glm4_moe", "router's bias", {"e_score_correction_bias": backwards(0)}),
)
SECTIONS = (
    Wrong("phi3", "fused qkv padded at the end", {"qkv_proj": zeros_last(0)}),
    Wrong("phi3", "gate_up padded at the end", {"gate_up_proj": zeros_last(0)}),
    Wrong("gemma4_text", "gate_up of experts at the end", {"experts.gate_up": zeros_last(1)}),
    Wrong("llama4_text", "the same, transposed", {"experts.gate_up": zeros_last(2)}),
    Wrong("gpt_oss", "gate and up as halves", {r"gate_up_proj$": in_sections(2, 1, 1)}),
    Wrong("gpt_oss", "their biases as halves", {"gate_up_proj_bias": in_sections(1, 1, 1)}),
    Wrong("qwen3_5", "q and gate as halves", {"q_proj": in_sections(0, 12, 12)}),
    Wrong("qwen3_5", "q|k|v padded at the end", {"in_proj_qkv": zeros_last(0)}),
    Wrong("qwen3_5", "its conv1d at the end", {"conv1d": zeros_last(0)}),
    Wrong("qwen3_next", "qkvz as sections", {"in_proj_qkvz": in_sections(0, 8, 8, 42, 42)}),
    Wrong("qwen3_next", "ba as halves", {"in_proj_ba": in_sections(0, 3, 3)}),
    Wrong("bamba", "z|x|B|C|dt padded at the end", {"in_proj": zeros_last(0)}),
    Wrong("bamba", "its conv1d at the end", {"conv1d.weight": zeros_last(0)}),
    Wrong("bamba", "its conv1d's bias at the end", {"conv1d.bias": zeros_last(0)}),
    Wrong("granitemoehybrid", "z|x|B|C|dt at the end", {"mamba.in_proj": zeros_last(0)}),
    Wrong("granitemoehybrid", "experts' gate_up at the end", {"moe.input": zeros_last(1)}),
    Wrong("granitemoehybrid", "shared gate_up", {"shared_mlp.input": zeros_last(0)}, tp=5),
    Wrong("deepseek_v3-mtp", "kv_b as halves", {"kv_b_proj": in_sections(0, 12, 10)}, tp=5),
)
NORMS = (
    *(
        Wrong(family, "weight not corrected", {tensor: uncorrected})
        for family, tensor in CORRECTED.items()
    ),
    *(Wrong(family, "eps not corrected", eps=False) for family in CORRECTED),
    Wrong("minimax_m2", "its eps, with copies", eps=False, way="in-group", tp=4),
    Wrong("minimax_m2", "dummy queries in the norm", {"q_proj": HALF}),
    Wrong("granitemoehybrid", "dummy channels in the norm", {"in_proj|conv1d.weight": HALF}),
    Wrong("bamba", "in a norm by groups", {"in_proj|conv1d.weight": HALF}, harmless=UNREAD),
)
FILLS = (
    Wrong("qwen3", "a dummy MLP column", {"gate_proj|up_proj|down_proj": HALF}),
    Wrong("llama", "its biases", {"(gate|up)_proj.bias|down_proj.weight": HALF}),
    Wrong("nemotron_h", "a dummy column of relu²", {r"mixer.(up|down)_proj": HALF}),
    Wrong("nemotron_h-latent", "and of an expert", {r"experts.\d.(up|down)_proj": HALF}),
    Wrong("mixtral", "a dummy expert column", {r"experts.\d.w[123]": HALF}),
    Wrong("deepseek_v3-mtp", "of a shared expert", {"shared_experts": HALF}),
    Wrong("gpt_oss", "biases of an expert", {"gate_up_proj_bias|down_proj$": HALF}),
    Wrong("qwen3", "a dummy value head", {"v_proj|o_proj": HALF}),
    Wrong("qwen2", "its bias", {"v_proj.bias|o_proj": HALF}),
    Wrong("qwen3", "a dummy query head that reads", {"o_proj": HALF}, "in-group", 4),
    Wrong("qwen3", "the same", {"q_proj": HALF}, "in-group", 4, harmless=UNREAD),
    Wrong("qwen3_5", "a dummy delta head", {"in_proj_qkv|in_proj_z|conv1d|linear.*out": HALF}),
    Wrong("kimi_linear", "a dummy KDA head", {r"layers\.0\.self.*([qkvo]_proj|g_b_|conv1d)": HALF}),
    Wrong("bamba", "a dummy Mamba head", {"in_proj|conv1d.weight|mamba.norm|out_proj": HALF}),
    Wrong("deepseek_v3-mtp", "a dummy latent head", {"kv_b_proj|o_proj": HALF}, tp=5),
    Wrong("deepseek_v4", "a dummy group of heads", {"wo_[ab]": HALF}, tp=5),
    Wrong("deepseek_v4", "rows of a dummy group", {"wo_a": HALF}, tp=5, harmless=UNREAD),
    Wrong("deepseek_v4", "columns of a dummy group", {"wo_b": HALF}, tp=5, harmless=UNFED),
    Wrong("gpt_oss", "sink +inf", {"sinks": filled(inf)}),
    Wrong("gpt_oss", "sink NaN", {"sinks": filled(nan)}),
    Wrong("gpt_oss", "sink 1", {"sinks": filled(1)}, harmless=UNFED),
    Wrong(
        "gpt_oss",
        "sink -inf",
        {"sinks": filled(-inf)},
        harmless="finite scores stand beside it; a kernel's tile may be masked whole, and this "
        "softmax has no tiles",
    ),
    Wrong("mimo_v2_flash", "sink NaN", {"attention_sink_bias": filled(nan)}),
    Wrong("qwen3_5", "decay NaN", {"A_log": filled(nan)}),
    Wrong("qwen3_5", "decay 1", {"A_log|dt_bias": filled(1)}, harmless="a state of 0 decays to 0"),
    Wrong("bamba", "decay NaN", {"dt_bias": filled(nan)}),
    Wrong("bamba", "decay and D 1", {"A_log|dt_bias|mamba.D": filled(1)}, harmless=UNFED),
)
ROWS = (*MAPS, *SECTIONS, *NORMS, *FILLS)


@cache
def planned(family, tp=3, way="append"):
    config = stock_model(family).config
    return plan(config, tp=tp, strategy=way, local_multiple=ASKED.get(family))


def wrong_by(family, broken, tp=3, way="append", factors=None):
    """How many bounds a broken plan is from the stock logits."""
    stock = stock_model(family)
    ours = padded_logits(stock, planned(family, tp, way), broken=broken, factors=factors)
    return apart(ours, stock.exact) / stock.bound


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.family}: {row.what} ({row.way})")
def test_a_broken_rule_is_seen(row):
    found = wrong_by(row.family, row.tensors, row.tp, row.way, None if row.eps else {})
    if row.harmless:
        assert found <= 1
    else:
        assert found > CLEAR


@pytest.mark.parametrize(("family", "head"), [("qwen3", "lm_head"), ("deepseek_v4", "^head")])
def test_a_dummy_token_with_a_logit_is_seen(family, head):
    stock = stock_model(family)
    ours = padded_logits(stock, planned(family), broken={head: HALF})
    assert tail(ours) > 0.1
    assert apart(ours, stock.exact) <= stock.bound


@cache
def kinds():
    """Every kind of dimension that grows, by what its tensors are called after the layer's number:
    the first family whose checkpoints must have it, their pattern and the dimension.
    """
    found = {}
    for family in RUN:
        model = plan(TINY[family], tp=1).model
        axes = {name: None for axis in model.axes for name in names_of(axis)}
        for rule in model.rules:
            if rule.spare or not any(True for _ in model.places(rule)):
                continue
            if any(other.instead == rule.pattern for other in model.rules):
                continue  # savers differ, and other families have the same kinds of both
            called = re.sub(r"^.*[*#\d]\.", "", rule.pattern)
            pattern = re.escape(rule.pattern).replace(r"\*", r"\d+").replace(r"\#", r"\d+")
            for dim, extent in enumerate(rule.dims):
                if any(part.axis for part in sections(extent, model.sizes, axes)):
                    kind = (called, extent, rule.correction)
                    found.setdefault(kind, (family, f"^{pattern}$", dim))
    return found


@pytest.mark.parametrize("family", RUN)
def test_every_kind_of_dimension_moved_by_one_is_seen(family):
    told = []
    for kind, (first, pattern, dim) in kinds().items():
        if first == family:
            found = wrong_by(family, {pattern: moved(dim)}, tp=7)
            if not found > CLEAR:
                told.append(f"{kind}: {found:.3g}")
    assert not told


def test_the_kinds_are_those_of_all_families():
    assert len(kinds()) > 100
    assert {family for family, *_ in kinds().values()} > {"qwen3_next", "deepseek_v4", "bamba"}
