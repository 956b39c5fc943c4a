"""Rules that most decoders share: grouped-query attention, gated MLPs, embedding and head.

Sizes they name: hidden, head_dim, rotary. Every function returns rows; ``only`` and ``spare``
narrow them to layers with a tag, or to tensors that may be missing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from tp3.pad.model import Rule

NO_QUERY = "a dummy head asks nothing: its scores are 0, its softmax uniform over values of 0"
NO_KEY = "read by dummy query heads alone"
NO_VALUE = "a dummy head returns 0"
NO_HEAD = "a dummy head adds nothing to the residual stream"
NO_GATE = "silu(0) = 0"
NO_UP = "the product with the gate is 0"
NO_WIDTH = "a dummy column adds nothing to the residual stream"
NO_TOKEN = "no token has this number"
NO_LOGIT = "the engine masks the tail of the vocabulary"
NO_SHARE = "adds nothing to the sum of squares, which the corrected weight and epsilon allow for"

NORMS = ("input_layernorm", "post_attention_layernorm")


def only(rules: Iterable[Rule], *tags: str) -> tuple[Rule, ...]:
    """The rules where a layer has all tags."""
    return tuple(replace(rule, when=(*tags, *rule.when)) for rule in rules)


def spare(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """The rules of tensors that may be missing, such as a draft layer that some savers drop."""
    return tuple(replace(rule, spare=True) for rule in rules)


def frame(root: str = "model.", head: str = "lm_head.weight") -> tuple[Rule, ...]:
    """Embedding, final norm and head of a decoder whose tensors lie under ``root``."""
    return (
        Rule(root + "embed_tokens.weight", ("vocab", "hidden"), NO_TOKEN, plain=True),
        Rule(head, ("vocab", "hidden"), NO_LOGIT, ("untied",), plain=True),
        Rule(head, ("vocab", "hidden"), NO_LOGIT, ("!untied",), plain=True, spare=True),
        Rule(root + "norm.weight", ("hidden",)),
    )


def attention(
    layer: str = "model.layers.*.",
    *,
    suffix: str = "",
    head: str = "head_dim",
    value: str = "head_dim",
    gated: bool = False,
    names: tuple[str, str] = ("q_norm", "k_norm"),
) -> tuple[Rule, ...]:
    """Grouped-query attention. Tags: qkv_bias, o_bias, qk_norm (per head), qk_norm_width.

    head, value: the sizes of a query and of a value head. gated: q_proj holds [q | gate] for each
    head. suffix: of the head axes, where the layer's tags do not say it. names: of the two norms.
    """
    at = layer + "self_attn."
    q, k = f"q_heads{suffix}*{head}", f"kv_heads{suffix}*{head}"
    v, o = f"kv_heads{suffix}*{value}", f"q_heads{suffix}*{value}"
    query = f"q_heads{suffix}*2*{head}" if gated else q
    wide = ("qk_norm_width",)
    return (
        Rule(at + "q_proj.weight", (query, "hidden"), NO_QUERY),
        Rule(at + "k_proj.weight", (k, "hidden"), NO_KEY),
        Rule(at + "v_proj.weight", (v, "hidden"), NO_VALUE),
        Rule(at + "q_proj.bias", (query,), NO_QUERY, ("qkv_bias",)),
        Rule(at + "k_proj.bias", (k,), NO_KEY, ("qkv_bias",)),
        Rule(at + "v_proj.bias", (v,), NO_VALUE, ("qkv_bias",)),
        Rule(at + "o_proj.weight", ("hidden", o), NO_HEAD),
        Rule(at + "o_proj.bias", ("hidden",), "", ("o_bias",)),
        Rule(f"{at}{names[0]}.weight", (head,), "", ("qk_norm",)),
        Rule(f"{at}{names[1]}.weight", (head,), "", ("qk_norm",)),
        Rule(f"{at}{names[0]}.weight", (q,), NO_SHARE, wide, correction="rms_width"),
        Rule(f"{at}{names[1]}.weight", (k,), NO_SHARE, wide, correction="rms_width"),
        # written by Transformers before 4.31; every engine ignores it
        Rule(at + "rotary_emb.inv_freq", ("rotary",), spare=True),
    )


def fused_attention(layer: str = "model.layers.*.") -> tuple[Rule, ...]:
    """Grouped-query attention whose q, k and v are sections of one projection (Phi-3)."""
    at = layer + "self_attn."
    qkv = "q_heads*head_dim + kv_heads*head_dim + kv_heads*head_dim"
    return (
        Rule(at + "qkv_proj.weight", (qkv, "hidden"), NO_QUERY),
        Rule(at + "o_proj.weight", ("hidden", "q_heads*head_dim"), NO_HEAD),
    )


def mlp(
    at: str = "model.layers.*.mlp.", width: str = "intermediate", when: tuple[str, ...] = ()
) -> tuple[Rule, ...]:
    """A gated MLP. Tag: mlp_bias."""
    return (
        Rule(at + "gate_proj.weight", (width, "hidden"), NO_GATE, when),
        Rule(at + "up_proj.weight", (width, "hidden"), NO_UP, when),
        Rule(at + "gate_proj.bias", (width,), NO_GATE, (*when, "mlp_bias")),
        Rule(at + "up_proj.bias", (width,), NO_UP, (*when, "mlp_bias")),
        Rule(at + "down_proj.weight", ("hidden", width), NO_WIDTH, when),
        Rule(at + "down_proj.bias", ("hidden",), "", (*when, "mlp_bias")),
    )


def fused_mlp(at: str = "model.layers.*.mlp.", width: str = "intermediate") -> tuple[Rule, ...]:
    """A gated MLP whose gate lies above its up projection (Phi-3, GLM-4)."""
    return (
        Rule(at + "gate_up_proj.weight", (f"{width} + {width}", "hidden"), NO_GATE),
        Rule(at + "down_proj.weight", ("hidden", width), NO_WIDTH),
    )


def norms(layer: str = "model.layers.*.", names: tuple[str, ...] = NORMS) -> tuple[Rule, ...]:
    """Norms over the hidden size, which no plan changes."""
    return tuple(Rule(f"{layer}{name}.weight", ("hidden",)) for name in names or NORMS)
