"""What a format asks of a plan's sizes, layer by layer."""

import pytest

from tp3.pad.corrections import eps_factors
from tp3.pad.formats import read_format
from tp3.pad.model import HeadAxes, Model, Rule
from tp3.pad.needs import Needs
from tp3.pad.spread import appended

Q_PROJ = Rule("model.layers.*.self_attn.q_proj.weight", ("q_heads*head_dim", "hidden"))
ABSENT = Rule("model.norm.weight", ("q_heads*head_dim",), when=("gone",), correction="rms_width")
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def model(*rules):
    """A full layer with heads of 128 before a sliding one with heads of 64."""
    return Model(
        model_type="test",
        axes=(HeadAxes(8, 8, 128), HeadAxes(8, 8, 64, suffix=".sliding")),
        sizes={"hidden": 1024, "head_dim": 128},
        layers=(frozenset({"full"}), frozenset({"sliding"})),
        sizes_by_tag={"sliding": {"head_dim": 64}},
        rules=rules,
        paths={},
    )


def test_every_geometry_keeps_its_blocks_whole():
    needs = Needs(model(Q_PROJ), read_format({"quantization_config": FP8}), 2, {})
    assert (needs.share("q_heads"), needs.share("q_heads.sliding")) == (1, 2)


def test_a_layer_that_stays_plain_asks_nothing_and_counts_its_own_bits():
    ignored = FP8 | {"modules_to_not_convert": ["model.layers.1.self_attn.q_proj"]}
    form = read_format({"quantization_config": ignored})
    assert [form.bits_of(Q_PROJ, layer) for layer in (0, 1)] == [8, 16]
    assert form.blocks(Q_PROJ, (1,)) == (1, 1)
    assert form.blocks(Q_PROJ, (0, 1)) == (128, 128)


def test_a_rule_that_applies_nowhere_corrects_nothing():
    spreads = {"q_heads": appended(8, 9), "q_heads.sliding": appended(8, 9)}
    assert eps_factors(model(ABSENT), spreads) == {}


@pytest.mark.parametrize(
    "broken",
    [{"weight_block_size": 5}, {"weight_block_size": [128]}, {"modules_to_not_convert": [1]}],
    ids=["block", "one-block", "module"],
)
def test_a_malformed_format_is_one_sentence(broken):
    with pytest.raises(ValueError, match="quantization_config is malformed"):
        read_format({"quantization_config": FP8 | broken})
