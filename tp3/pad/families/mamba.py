"""Rules of a Mamba-2 mixer. Its groups share B and C among their heads.

Where there are several groups, whole groups are appended, and the norm, which is by groups, stays
as it is. A single group stays one: heads are appended inside it, B and C are every rank's, and the
norm over all channels is corrected. Sections: ``in_proj`` is z, x, B, C, dt; ``conv1d`` x, B, C.
Names and shapes: Transformers 5.24, ``models/bamba``, ``models/nemotron_h``, ``models/falcon_h1``.
"""

from __future__ import annotations

from tp3.pad.families.config import Config
from tp3.pad.families.llama import NO_HEAD, NO_SHARE
from tp3.pad.model import Rule, Units

NO_CHANNEL = "a dummy head has an input, a state and a gate of 0"
NO_DECAY = "a finite decay of a state of 0"


def mamba_axis(heads: int, groups: int) -> Units:
    """Groups with their heads, or the heads of a single group."""
    if heads % groups:
        raise ValueError(f"Mamba heads must be a multiple of its groups, got {heads} and {groups}")
    if groups == 1:
        return Units("mamba_heads", heads)
    return Units("mamba_groups", groups, {"mamba_heads": heads // groups})


def mamba_sizes(config: Config, head_dim: str, state: str, conv: str) -> dict[str, int]:
    """The sizes that ``mixer`` names, under the config's keys."""
    return {
        "mamba_head_dim": config.size(head_dim),
        "mamba_state": config.size(state),
        "conv": config.size(conv),
    }


def mixer(at: str, groups: int, when: tuple[str, ...] = ("mamba",)) -> tuple[Rule, ...]:
    """A mixer. Tags: mamba_bias, mamba_out_bias, conv_bias, mamba_norm."""
    width = "mamba_heads*mamba_head_dim"
    shared = "mamba_state" if groups == 1 else "mamba_groups*mamba_state"
    convolved = f"{width} + {shared} + {shared}"
    projected = f"{width} + {convolved} + mamba_heads"
    heads = (
        Rule(at + name, ("mamba_heads",), why, when, plain=True)
        for name, why in (("A_log", NO_DECAY), ("D", NO_CHANNEL), ("dt_bias", NO_DECAY))
    )
    return (
        Rule(at + "in_proj.weight", (projected, "hidden"), NO_CHANNEL, when),
        Rule(at + "in_proj.bias", (projected,), NO_CHANNEL, (*when, "mamba_bias")),
        Rule(at + "conv1d.weight", (convolved, "1", "conv"), NO_CHANNEL, when, plain=True),
        Rule(at + "conv1d.bias", (convolved,), NO_CHANNEL, (*when, "conv_bias")),
        *heads,
        Rule(
            at + "norm.weight",
            (width,),
            NO_SHARE if groups == 1 else NO_CHANNEL,
            (*when, "mamba_norm"),
            correction="rms_width" if groups == 1 else "",
        ),
        Rule(at + "out_proj.weight", ("hidden", width), NO_HEAD, when),
        Rule(at + "out_proj.bias", ("hidden",), "", (*when, "mamba_out_bias")),
    )
