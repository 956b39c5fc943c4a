"""Rules of Kimi delta attention (KDA): as many heads of keys as of values, a decay per channel.

Names and shapes: Transformers 5.24, ``models/kimi_linear``; a dummy head's state stays 0 whatever
its decay is.
"""

from __future__ import annotations

from tp3.pad.families.config import Config
from tp3.pad.families.latent import LAYER, Tagged
from tp3.pad.families.llama import NO_HEAD
from tp3.pad.model import Rule

NO_STATE = "a dummy head writes 0 into a state of 0"
NO_DECAY = "a finite decay of a state of 0"
NO_GATE = "the gate of an output of 0"


def delta(
    decay: tuple[str, ...], at: str = LAYER + "self_attn.", when: Tagged = ("kda",)
) -> tuple[Rule, ...]:
    """Delta attention; ``decay``: the dimensions of ``A_log``."""
    width = "kda_heads*kda_head_dim"
    sections = [
        rule
        for name in "qkv"
        for rule in (
            Rule(f"{at}{name}_proj.weight", (width, "hidden"), NO_STATE, when),
            Rule(f"{at}{name}_conv1d.weight", (width, "1", "conv"), NO_STATE, when, plain=True),
        )
    ]
    return (
        *sections,
        Rule(at + "A_log", decay, NO_DECAY, when, plain=True),
        Rule(at + "dt_bias", (width,), NO_DECAY, when),
        Rule(at + "f_a_proj.weight", ("kda_head_dim", "hidden"), "", when),
        Rule(at + "f_b_proj.weight", (width, "kda_head_dim"), NO_DECAY, when),
        # a row per head: no block of a format fits, every checkpoint keeps it plain
        Rule(at + "b_proj.weight", ("kda_heads", "hidden"), NO_STATE, when, plain=True),
        Rule(at + "g_a_proj.weight", ("kda_head_dim", "hidden"), "", when),
        Rule(at + "g_b_proj.weight", (width, "kda_head_dim"), NO_GATE, when),
        Rule(at + "o_norm.weight", ("kda_head_dim",), "", when),
        Rule(at + "o_proj.weight", ("hidden", width), NO_HEAD, when),
    )


def delta_heads(config: Config) -> tuple[int, dict[str, int], tuple[str, ...]]:
    """Heads, the sizes that ``delta`` names, and where the config says the heads."""
    if config.has("linear_attn_config"):
        inner = config.folder("linear_attn_config")
        heads, head_dim = inner.size("num_heads"), inner.size("head_dim")
        conv, places = inner.size("short_conv_kernel_size", 4), [inner.path("num_heads")]
    else:
        heads, head_dim = config.size("linear_num_heads"), config.size("linear_head_dim")
        conv, places = config.size("linear_conv_kernel_dim", 4), []
    if config.has("linear_num_heads"):
        places.append(config.path("linear_num_heads"))
    return heads, {"kda_head_dim": head_dim, "conv": conv}, tuple(places)
