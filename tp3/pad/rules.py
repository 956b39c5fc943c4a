"""Which tensors of a checkpoint are padded, along what, and why zero is right: data, no torch.

A row reads: *the tensors of this name have, along this kind of axis, so many of these; a zero
there means this.* Kinds: `rows` and `columns` count single entries of dimension 0 and 1,
`row_units` and `column_units` whole heads of `head_dim` entries, `untouched` passes through. `*`
stands for the layer number.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tp3.pad.shape import Shape

Kind = Literal["rows", "columns", "row_units", "column_units", "untouched"]


@dataclass(frozen=True)
class Rule:
    """`counts` names the size along the axis, `across` the other dimension (empty for a vector).

    `when` is `always`, `never`, or the flag of Shape that makes the tensor required; a `spare`
    tensor may be there unasked.
    """

    pattern: str
    kind: Kind
    counts: str
    across: str
    zero: str
    when: str = "always"
    spare: bool = False

    @property
    def dim(self) -> int:
        return 1 if self.kind in ("columns", "column_units") else 0

    def tensor_shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        unit = sizes["head_dim"] if self.kind in ("row_units", "column_units") else 1
        along = sizes[self.counts] * unit
        if not self.across:
            return (along,)
        other = sizes[self.across]
        return (other, along) if self.dim == 1 else (along, other)

    def least(self, shape: Shape) -> int:
        """How many tensors the model must have."""
        needed = self.when == "always" or (self.when != "never" and getattr(shape, self.when))
        return self._places(shape) if needed else 0

    def most(self, shape: Shape) -> int:
        return self._places(shape) if self.spare else self.least(shape)

    def _places(self, shape: Shape) -> int:
        return shape.layers if "*" in self.pattern else 1


_ATTENTION = "model.layers.*.self_attn."
_MLP = "model.layers.*.mlp."
_KEPT = "not padded"
_NO_QUERY = "a dummy head asks nothing: its scores are 0, its softmax uniform over values of 0"
_NO_KEY = "read by dummy query heads alone"
_NO_VALUE = "a dummy head returns 0"
_NO_HEAD = "a dummy head adds nothing to the residual stream"
_NO_GATE = "silu(0) = 0"
_NO_UP = "the product with the gate is 0"
_NO_WIDTH = "a dummy column adds nothing to the residual stream"
_NO_TOKEN = "no token has this number"
_NO_LOGIT = "the engine masks the tail of the vocabulary"

LLAMA_RULES = (
    Rule("model.embed_tokens.weight", "rows", "vocab", "hidden", _NO_TOKEN),
    Rule("lm_head.weight", "rows", "vocab", "hidden", _NO_LOGIT, when="untied", spare=True),
    Rule(_ATTENTION + "q_proj.weight", "row_units", "q_heads", "hidden", _NO_QUERY),
    Rule(_ATTENTION + "k_proj.weight", "row_units", "kv_heads", "hidden", _NO_KEY),
    Rule(_ATTENTION + "v_proj.weight", "row_units", "kv_heads", "hidden", _NO_VALUE),
    Rule(_ATTENTION + "q_proj.bias", "row_units", "q_heads", "", _NO_QUERY, when="qkv_bias"),
    Rule(_ATTENTION + "k_proj.bias", "row_units", "kv_heads", "", _NO_KEY, when="qkv_bias"),
    Rule(_ATTENTION + "v_proj.bias", "row_units", "kv_heads", "", _NO_VALUE, when="qkv_bias"),
    Rule(_ATTENTION + "o_proj.weight", "column_units", "q_heads", "hidden", _NO_HEAD),
    Rule(_ATTENTION + "o_proj.bias", "untouched", "hidden", "", _KEPT, when="o_bias"),
    Rule(_ATTENTION + "q_norm.weight", "untouched", "head_dim", "", _KEPT, when="qk_norm"),
    Rule(_ATTENTION + "k_norm.weight", "untouched", "head_dim", "", _KEPT, when="qk_norm"),
    # written by Transformers before 4.31; every engine ignores it
    Rule(_ATTENTION + "rotary_emb.inv_freq", "untouched", "rotary", "", _KEPT, "never", spare=True),
    Rule(_MLP + "gate_proj.weight", "rows", "intermediate", "hidden", _NO_GATE),
    Rule(_MLP + "up_proj.weight", "rows", "intermediate", "hidden", _NO_UP),
    Rule(_MLP + "gate_proj.bias", "rows", "intermediate", "", _NO_GATE, when="mlp_bias"),
    Rule(_MLP + "up_proj.bias", "rows", "intermediate", "", _NO_UP, when="mlp_bias"),
    Rule(_MLP + "down_proj.weight", "columns", "intermediate", "hidden", _NO_WIDTH),
    Rule(_MLP + "down_proj.bias", "untouched", "hidden", "", _KEPT, when="mlp_bias"),
    Rule("model.layers.*.input_layernorm.weight", "untouched", "hidden", "", _KEPT),
    Rule("model.layers.*.post_attention_layernorm.weight", "untouched", "hidden", "", _KEPT),
    Rule("model.norm.weight", "untouched", "hidden", "", _KEPT),
)

_BY_PATTERN = {rule.pattern: rule for rule in LLAMA_RULES}
_LAYER = re.compile(r"(?<=\.layers\.)\d+(?=\.)")


def sizes_of(shape: Shape) -> dict[str, int]:
    """Every size that a rule may name, as trained."""
    return {
        "q_heads": shape.q_heads,
        "kv_heads": shape.kv_heads,
        "intermediate": shape.intermediate,
        "vocab": shape.vocab,
        "hidden": shape.hidden,
        "head_dim": shape.head_dim,
        "rotary": shape.head_dim // 2,
    }


def find_rule(name: str, shape: Shape) -> Rule | None:
    """The row for a tensor; None for a name or a layer that the model does not have."""
    layer = _LAYER.search(name)
    if layer and int(layer.group()) >= shape.layers:
        return None
    rule = _BY_PATTERN.get(_LAYER.sub("*", name))
    return rule if rule and rule.most(shape) else None
