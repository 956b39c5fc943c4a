"""Every family in Transformers: the padded model's logits are the stock model's, at every size and
by every way to pad heads; and where a way has no answer, the planner says so.
"""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.pad.exact import (
    ASKED,
    RUN,
    TINY,
    TOKENS,
    apart,
    padded_logits,
    stock_model,
    tail,
)
from tp3.pad.families import READERS
from tp3.pad.heads import STRATEGIES
from tp3.pad.model import HeadAxes
from tp3.pad.planner import plan

# At 4 a query head of zeros reads a KV head that is real; the others are what nobody else serves.
SIZES = (3, 4, 5, 6, 7)
# By the query and KV heads of a family's layers: the sizes at which a strategy has an answer.
# ``auto`` always has one. Latent attention has no KV heads, so that all strategies are one.
ANSWERS = {
    (): dict.fromkeys(STRATEGIES, SIZES),
    ((4, 2),): {"append": SIZES, "in-group": SIZES, "split-group": (4,)},
    ((6, 2),): {"append": SIZES, "in-group": SIZES, "split-group": (3, 6)},
    ((6, 2), (6, 1)): {"append": SIZES, "in-group": SIZES, "split-group": (3, 6)},
    ((6, 2), (8, 2)): {"append": SIZES, "in-group": SIZES, "split-group": ()},
    # MiMo, whose config has one count of KV heads: sliding layers have twice as many
    ((12, 2), (12, 4)): {"append": SIZES, "in-group": (3, 6, 7), "split-group": (3, 6)},
}


def geometry(name):
    axes = plan(TINY[name], tp=1).model.axes
    return tuple((axis.q, axis.kv) for axis in axes if isinstance(axis, HeadAxes))


@pytest.mark.parametrize("name", RUN)
def test_padded_logits_are_the_stock_ones(name):
    stock, answers, told = stock_model(name), ANSWERS[geometry(name)], []
    asked = {"local_multiple": ASKED.get(name)}
    for tp in SIZES:
        done = []
        for way in (*STRATEGIES, "auto"):
            if tp not in answers.get(way, SIZES):
                with pytest.raises(ValueError, match=f"^{way} cannot pad .* to {tp} ranks$"):
                    plan(stock.config, tp=tp, strategy=way, **asked)
                continue
            planned = plan(stock.config, tp=tp, strategy=way, **asked)
            assert not planned.inert
            if planned.spreads in done:
                continue
            done.append(planned.spreads)
            ours = padded_logits(stock, planned)
            error = apart(ours, stock.exact)
            if error > stock.bound or tail(ours):
                told.append(f"TP {tp} {way}: {error:.3g} > {stock.bound:.3g}, tail {tail(ours)}")
    assert not told, f"{name}: {'; '.join(told)}"


@pytest.mark.parametrize("name", RUN)
def test_in_fp32_a_padded_model_rounds_as_the_stock_one(name):
    """The root mean square of all errors, at most twice that of Transformers' own."""
    import torch

    stock = stock_model(name)
    planned = plan(stock.config, tp=3, local_multiple=ASKED.get(name))
    ours = padded_logits(stock, planned, torch.float32)[..., :TOKENS]
    assert 0 < (ours - stock.exact).norm() <= 2 * (stock.single - stock.exact).norm()


def test_every_family_of_both_is_here():
    """A new reader, or one for what a new Transformers knows, needs a tiny config."""
    from transformers.models.auto import modeling_auto as auto

    assert set(TINY) - set(RUN) == {"llama4", "olmoe"}
    assert {geometry(name) for name in RUN} == set(ANSWERS)
    kinds = {config["model_type"] for config in TINY.values()}
    known = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES | auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    assert set(READERS) & set(known) <= kinds
