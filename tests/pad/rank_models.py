"""Decoders of several families as the ranks of an engine run them; a family is a row of ``MODELS``.

Which block a layer has is told by the tensors it has. Sizes come from the padded config alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.pad import rank_blocks as blocks
from tests.pad.rank_math import rms, rotary
from tests.pad.shards import Ranks

Block = Callable[[Ranks, int, Tensor], Tensor]


@dataclass(frozen=True)
class Decoder:
    """attention, mlp: from a layer's number and normed hidden states to what is added. one_more:
    norms multiply by 1 + their weight.
    """

    attention: Block
    mlp: Block
    one_more: bool = False


def logits(model: str, ranks: Ranks, tokens: Tensor) -> Tensor:
    """The logits [T, padded vocabulary] of tokens [T]."""
    decoder, c = MODELS[model], ranks.config

    def norm(name: str, x: Tensor) -> Tensor:
        weight = ranks[f"model.{name}.weight"]
        return rms(x, 1 + weight if decoder.one_more else weight, c["rms_norm_eps"])

    x = ranks.embedded("model.embed_tokens.weight", tokens) * c.get("embedding_multiplier", 1)
    scale = c.get("residual_multiplier", 1)
    for layer in range(c["num_hidden_layers"]):
        at = f"layers.{layer}."
        x = x + scale * decoder.attention(ranks, layer, norm(at + "input_layernorm", x))
        x = x + scale * decoder.mlp(ranks, layer, norm(at + "post_attention_layernorm", x))
    return ranks.logits("lm_head.weight", norm("norm", x)) / c.get("logits_scaling", 1)


def _attention(ranks: Ranks, layer: int, x: Tensor, **how: Any) -> Tensor:
    c = ranks.config
    rope, head_dim = c["rope_parameters"], ranks.head_dim
    turned = int(head_dim * rope.get("partial_rotary_factor", 1))
    tables = rotary(len(x), turned, rope["rope_theta"])
    at = f"model.layers.{layer}.self_attn."
    return blocks.attention(ranks, at, x, tables, head_dim**-0.5, **how)


def _next_attention(ranks: Ranks, layer: int, x: Tensor) -> Tensor:
    at = f"model.layers.{layer}.linear_attn."
    if at + "A_log" in ranks:
        return blocks.delta_net(ranks, at, x)
    return _attention(ranks, layer, x, gated=True, norm="head")


def _sliding_attention(ranks: Ranks, layer: int, x: Tensor) -> Tensor:
    slides = ranks.config["layer_types"][layer] == "sliding_attention"
    window = ranks.config["sliding_window"] if slides else None
    return _attention(ranks, layer, x, window=window)


def _latent_attention(ranks: Ranks, layer: int, x: Tensor) -> Tensor:
    c = ranks.config
    tables = rotary(len(x), c["qk_rope_head_dim"], c["rope_parameters"]["rope_theta"])
    return blocks.latent_attention(ranks, f"model.layers.{layer}.self_attn.", x, tables)


def _granite_attention(ranks: Ranks, layer: int, x: Tensor) -> Tensor:
    at = f"model.layers.{layer}."
    if at + "mamba.A_log" in ranks:
        return blocks.mamba_mixer(ranks, at + "mamba.", x)
    scale = ranks.config["attention_multiplier"]
    return blocks.attention(ranks, at + "self_attn.", x, None, scale)


def _mlp(ranks: Ranks, layer: int, x: Tensor) -> Tensor:
    return blocks.mlp(ranks, f"model.layers.{layer}.mlp.", x)


def _single(ranks: Ranks, at: str, names: tuple[str, str, str]) -> blocks.Expert:
    """Experts of a tensor each: the names of gate, up and down."""

    def expert(rank: int, number: int, x: Tensor) -> Tensor:
        gate, up = (x @ ranks.cut(f"{at}{number}.{each}.weight", rank).T for each in names[:2])
        return (F.silu(gate) * up) @ ranks.cut(f"{at}{number}.{names[2]}.weight", rank, 1).T

    return expert


PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def _next_mlp(ranks: Ranks, layer: int, x: Tensor) -> Tensor:
    at = f"model.layers.{layer}.mlp."
    if at + "gate.weight" not in ranks:
        return blocks.mlp(ranks, at, x)
    scores = (x @ ranks[at + "gate.weight"].T).softmax(-1)
    weights, chosen = scores.topk(ranks.config["num_experts_per_tok"])
    routed = weights / weights.sum(-1, keepdim=True), chosen
    gate = (x @ ranks[at + "shared_expert_gate.weight"].T).sigmoid()
    shared = blocks.mlp(ranks, at + "shared_expert.", x)
    return (
        blocks.experts(ranks, x, routed, _single(ranks, at + "experts.", PROJECTIONS))
        + gate * shared
    )


def _deepseek_mlp(ranks: Ranks, layer: int, x: Tensor) -> Tensor:
    """The best groups by their two best experts, then the best experts of these."""
    at, c = f"model.layers.{layer}.mlp.", ranks.config
    if at + "gate.weight" not in ranks:
        return blocks.mlp(ranks, at, x)
    scores = (x @ ranks[at + "gate.weight"].T).sigmoid()
    by_group = (scores + ranks[at + "gate.e_score_correction_bias"]).unflatten(
        -1, (c["n_group"], -1)
    )
    best = by_group.topk(2).values.sum(-1).topk(c["topk_group"]).indices
    open_to = torch.zeros(by_group.shape[:2], dtype=torch.bool).scatter(1, best, True)
    open_scores = by_group.masked_fill(~open_to[..., None], -torch.inf).flatten(1)
    chosen = open_scores.topk(c["num_experts_per_tok"]).indices
    weights = scores.gather(1, chosen)
    weights = weights / weights.sum(-1, keepdim=True) * c["routed_scaling_factor"]
    expert = _single(ranks, at + "experts.", PROJECTIONS)
    shared = blocks.mlp(ranks, at + "shared_experts.", x)
    return blocks.experts(ranks, x, (weights, chosen), expert) + shared


def _minimax_mlp(ranks: Ranks, layer: int, x: Tensor) -> Tensor:
    at = f"model.layers.{layer}.block_sparse_moe."
    scores = (x @ ranks[at + "gate.weight"].T).sigmoid()
    by_bias = scores + ranks[at + "e_score_correction_bias"]
    chosen = by_bias.topk(ranks.config["num_experts_per_tok"]).indices
    weights = scores.gather(1, chosen)
    routed = weights / weights.sum(-1, keepdim=True), chosen
    return blocks.experts(ranks, x, routed, _single(ranks, at + "experts.", ("w1", "w3", "w2")))


def _olmoe_mlp(ranks: Ranks, layer: int, x: Tensor) -> Tensor:
    at = f"model.layers.{layer}.mlp."
    scores = (x @ ranks[at + "gate.weight"].T).softmax(-1)
    routed = scores.topk(ranks.config["num_experts_per_tok"])
    expert = _single(ranks, at + "experts.", PROJECTIONS)
    return blocks.experts(ranks, x, (routed.values, routed.indices), expert)


def _granite_mlp(ranks: Ranks, layer: int, x: Tensor) -> Tensor:
    """Fused experts [E, 2I, H], gate above up, and a shared MLP alike."""
    at = f"model.layers.{layer}."
    moe = at + "block_sparse_moe."
    best = (x @ ranks[moe + "router.layer.weight"].T).topk(ranks.config["num_experts_per_tok"])
    width = ranks[moe + "output_linear.weight"].shape[2]

    def expert(rank: int, number: int, tokens: Tensor) -> Tensor:
        rows = ranks.cut(moe + "input_linear.weight", rank, 1, [width, width])[number]
        gate, up = (tokens @ rows.T).chunk(2, -1)
        return (F.silu(gate) * up) @ ranks.cut(moe + "output_linear.weight", rank, 2)[number].T

    routed = blocks.experts(ranks, x, (best.values.softmax(-1), best.indices), expert)
    return routed + blocks.fused_mlp(ranks, at + "shared_mlp.", x)


def _oss_mlp(ranks: Ranks, layer: int, x: Tensor) -> Tensor:
    """Experts [E, H, 2I] of neighbouring gate and up columns with biases, clamped."""
    at, c = f"model.layers.{layer}.mlp.", ranks.config
    scores = x @ ranks[at + "router.weight"].T + ranks[at + "router.bias"]
    best = scores.topk(c["num_experts_per_tok"])
    limit, alpha = c["swiglu_limit"], c["swiglu_alpha"]

    def expert(rank: int, number: int, tokens: Tensor) -> Tensor:
        columns = ranks.cut(at + "experts.gate_up_proj", rank, 2)[number]
        bias = ranks.cut(at + "experts.gate_up_proj_bias", rank, 1)[number]
        gate, up = (tokens @ columns + bias).unflatten(-1, (-1, 2)).unbind(-1)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        y = (up + 1) * gate * (gate * alpha).sigmoid()
        y = y @ ranks.cut(at + "experts.down_proj", rank, 1)[number]
        # the bias of a row-parallel projection is added by one rank
        return y + ranks[at + "experts.down_proj_bias"][number] * (rank == 0)

    return blocks.experts(ranks, x, (best.values.softmax(-1), best.indices), expert)


_WIDE = partial(_attention, norm="width")
MODELS = {
    "llama": Decoder(_attention, _mlp),
    "qwen2": Decoder(_attention, _mlp),
    "qwen3_next": Decoder(_next_attention, _next_mlp, one_more=True),
    "deepseek_v3": Decoder(_latent_attention, _deepseek_mlp),
    "minimax_m2": Decoder(_WIDE, _minimax_mlp),
    "olmoe": Decoder(_WIDE, _olmoe_mlp),
    "granitemoehybrid": Decoder(_granite_attention, _granite_mlp),
    "gpt_oss": Decoder(_sliding_attention, _oss_mlp),
}
