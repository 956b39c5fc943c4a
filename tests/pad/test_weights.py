"""The stream: exact zeros, order, identity, coverage, errors; a wrong fill or map is noticed."""

from dataclasses import replace

import pytest
import torch

from tp3.pad import padded_weights, plan
from tp3.pad.planner import Axis
from tp3.pad.weights import Tally
from tp3.smoke.llama import Llama
from tp3.smoke.source import RandomLlama

SOURCE = RandomLlama()
CONFIG = SOURCE.config()
PROMPT = [5, 17, 300, 2, 98, 41, 7, 7, 250]
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def prompt_logits(planned, weights, dtype=torch.float32):
    """Of the padded model as a whole, on one rank."""
    model = Llama(planned.padded_config(CONFIG), weights, vocab_size=333, dtype=dtype)
    return model.generate(PROMPT, 0)[1].double()


def test_real_values_stay_and_the_rest_is_zero_in_poisoned_memory():
    planned = plan(CONFIG, tp=5)
    stock = dict(SOURCE.weights())
    torch.use_deterministic_algorithms(True)  # new tensors are filled with NaN
    try:
        padded = dict(padded_weights(SOURCE.weights(), planned))
    finally:
        torch.use_deterministic_algorithms(False)
    assert list(padded) == list(stock)
    assert padded[Q_PROJ].shape == (30 * 8, 176)
    for name, tensor in padded.items():
        region = tuple(slice(size) for size in stock[name].shape)
        assert torch.equal(tensor[region], stock[name]), name
        assert tensor.count_nonzero() == stock[name].count_nonzero(), f"{name} has a non-zero pad"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtype_is_kept(dtype):
    stream = ((name, tensor.to(dtype)) for name, tensor in SOURCE.weights())
    assert {t.dtype for _, t in padded_weights(stream, plan(CONFIG))} == {dtype}


def test_one_tensor_at_a_time():
    pulled = []

    def stream():
        for name, tensor in SOURCE.weights():
            pulled.append(name)
            yield name, tensor

    for index, (name, _) in enumerate(padded_weights(stream(), plan(CONFIG))):
        assert pulled[index:] == [name]


def test_untouched_tensors_are_the_same_objects():
    stock = dict(SOURCE.weights())
    same = {n for n, t in padded_weights(stock.items(), plan(CONFIG)) if t is stock[n]}
    assert same == {name for name in stock if "norm" in name}


def test_an_inert_plan_returns_the_same_stream():
    stream = SOURCE.weights()
    assert padded_weights(stream, plan(CONFIG, tp=1)) is stream


def test_tally_counts_each_rule():
    planned, tally = plan(CONFIG, tp=3), Tally()
    list(padded_weights(SOURCE.weights(), planned, tally=tally))
    assert tally.lines(planned) == [
        "model.embed_tokens.weight 1 × [333 → 384]",
        "lm_head.weight 1 × [333 → 384]",
        "self_attn.q_proj.weight 2 × [176 → 192]",
        "self_attn.k_proj.weight 2 × [88 → 96]",
        "self_attn.v_proj.weight 2 × [88 → 96]",
        "self_attn.o_proj.weight 2 × [176 → 192]",
        "mlp.gate_proj.weight 2 × [499 → 501]",
        "mlp.up_proj.weight 2 × [499 → 501]",
        "mlp.down_proj.weight 2 × [499 → 501]",
    ]


BIAS = "model.layers.0.self_attn.q_proj.bias"
MTP = "model.layers.2.self_attn.q_proj.weight"
BROKEN_STREAMS = [
    pytest.param(lambda w: w | {"visual.x": torch.ones(3)}, "visual.x is not part", id="unknown"),
    pytest.param(lambda w: w | {BIAS: torch.ones(176)}, f"{BIAS} is not part", id="unplanned-bias"),
    pytest.param(lambda w: w | {MTP: w[Q_PROJ]}, f"{MTP} is not part", id="layer-too-many"),
    pytest.param(
        lambda w: w | {Q_PROJ: w[Q_PROJ][:-8]},
        rf"{Q_PROJ} has shape \[168, 176\], expected \[176, 176\]",
        id="misshaped",
    ),
    pytest.param(
        lambda w: {name: tensor for name, tensor in w.items() if name != Q_PROJ},
        f"{Q_PROJ} is missing: 1 of 2 self_attn.q_proj.weight came",
        id="missing",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("broken", "sentence"), BROKEN_STREAMS)
def test_a_stream_that_is_not_the_configs_is_refused(broken, sentence):
    stream = broken(dict(SOURCE.weights())).items()
    with pytest.raises(ValueError, match=sentence):
        list(padded_weights(stream, plan(CONFIG)))
    with pytest.warns(UserWarning, match=sentence):
        loose = list(padded_weights(stream, plan(CONFIG), strict=False))
    assert [name for name, _ in loose] == [name for name, _ in stream]


def test_a_tensor_that_comes_twice_is_refused():
    stream = [(Q_PROJ, dict(SOURCE.weights())[Q_PROJ])] * 2
    with pytest.raises(ValueError, match=f"{Q_PROJ} came twice"):
        list(padded_weights(stream, plan(CONFIG)))


def test_a_tied_head_and_old_rotary_buffers_may_be_there():
    tied = RandomLlama(tied=True)
    stock = dict(tied.weights())
    spare = {
        "lm_head.weight": stock["model.embed_tokens.weight"],
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
    }
    padded = dict(padded_weights((stock | spare).items(), plan(tied.config())))
    assert padded["lm_head.weight"].shape == (384, 176)


@pytest.mark.parametrize("tp", [2, 3, 4, 5, 6, 7])
def test_the_padded_model_computes_the_same_function(tp):
    stock = plan(CONFIG, tp=1)
    exact = prompt_logits(stock, SOURCE.weights(), torch.float64)
    rounding = (prompt_logits(stock, SOURCE.weights()) - exact).abs().max()
    planned = plan(CONFIG, tp=tp)
    padded = prompt_logits(planned, padded_weights(SOURCE.weights(), planned))
    assert (padded - exact).abs().max() <= 2 * rounding


# A single wrong fill is harmless by design: its partner multiplies it by zero.
@pytest.mark.parametrize("roles", [("v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")])
def test_control_a_wrong_fill_is_noticed(roles):
    planned = plan(CONFIG, tp=3)
    exact = prompt_logits(plan(CONFIG, tp=1), SOURCE.weights(), torch.float64)
    padded = dict(padded_weights(SOURCE.weights(), planned))
    stock = dict(SOURCE.weights())
    for name, tensor in padded.items():
        if name.split(".")[-2] in roles:
            real = tensor.clone()
            tensor.fill_(0.5)
            tensor[tuple(slice(size) for size in stock[name].shape)] = stock[name]
            assert not torch.equal(real, tensor)
    assert (prompt_logits(planned, padded.items()) - exact).abs().max() > 0.1


def test_control_query_heads_padded_without_their_groups_are_noticed():
    """22 heads on 11 KV heads widened to 33 on 11: all fits, and most read another head's keys."""
    exact = prompt_logits(plan(CONFIG, tp=1), SOURCE.weights(), torch.float64)
    stock = plan(CONFIG, tp=1)
    wrong = replace(stock, axes=(Axis("q_heads", 22, 33, 33, "alone"), *stock.axes[1:]))
    padded = padded_weights(SOURCE.weights(), wrong)
    assert (prompt_logits(wrong, padded) - exact).abs().max() > 0.1
