"""The stream: exact zeros, order, identity, coverage, errors; a wrong fill or map is noticed."""

import gc
import weakref
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tp3.pad import padded_weights, plan
from tp3.pad.catalogue import Catalogue, Entry
from tp3.pad.corrections import eps_factor, weight_factor
from tp3.pad.model import Rule
from tp3.pad.spread import appended, kept, picked
from tp3.pad.weights import Tally, pad_tensor
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
    assert tally.lines() == [
        "model.embed_tokens.weight 1 × [333 → 384]",
        "lm_head.weight 1 × [333 → 384]",
        "self_attn.q_proj.weight 2 × [176 → 192]",
        "self_attn.k_proj.weight 2 × [88 → 96]",
        "self_attn.v_proj.weight 2 × [88 → 96]",
        "self_attn.o_proj.weight 2 × [176 → 192]",
        "mlp.gate_proj.weight 2 × [499 → 528]",
        "mlp.up_proj.weight 2 × [499 → 528]",
        "mlp.down_proj.weight 2 × [499 → 528]",
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
        f"{Q_PROJ} is missing",
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


def test_a_part_of_a_checkpoint_lacks_nothing_and_holds_nothing_else():
    part = [(Q_PROJ, dict(SOURCE.weights())[Q_PROJ])]
    whole = [(n, t) for n, t in padded_weights(SOURCE.weights(), plan(CONFIG)) if n == Q_PROJ]
    ((name, tensor),) = padded_weights(part, plan(CONFIG), whole=False)
    assert (name, tensor.shape) == (Q_PROJ, whole[0][1].shape)
    other = [("model.unknown.weight", torch.ones(2, 2))]
    with pytest.raises(ValueError, match=r"model\.unknown\.weight"):
        list(padded_weights(other, plan(CONFIG), whole=False))
    with pytest.warns(UserWarning, match=r"model\.unknown\.weight"):
        list(padded_weights(other, plan(CONFIG), strict=False, whole=False))


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
    axes = tuple(replace(a, padded=33) if a.name == "q_heads" else a for a in stock.axes)
    spreads = dict(stock.spreads) | {"q_heads": appended(22, 33)}
    wrong = replace(stock, axes=axes, spreads=spreads)
    padded = padded_weights(SOURCE.weights(), wrong)
    assert (prompt_logits(wrong, padded) - exact).abs().max() > 0.1


@pytest.mark.parametrize(("strategy", "tp"), [("in-group", 4), ("split-group", 4)])
def test_copied_heads_compute_the_same_function(strategy, tp):
    class Few(RandomLlama):
        def config(self):
            heads = {"num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 8}
            return super().config() | heads

    source, stock = Few(), plan(Few().config(), tp=1)
    planned = plan(source.config(), tp=tp, strategy=strategy)
    assert planned.padded_sizes["kv_heads"] > 2

    def logits(plan, dtype):
        weights = padded_weights(source.weights(), plan)
        model = Llama(plan.padded_config(source.config()), weights, vocab_size=333, dtype=dtype)
        return model.generate(PROMPT, 0)[1].double()

    exact = logits(stock, torch.float64)
    rounding = (logits(stock, torch.float32) - exact).abs().max()
    assert (logits(planned, torch.float32) - exact).abs().max() <= 2 * rounding
    assert (logits(planned, torch.float64) - exact).abs().max() < 1e-12


def test_an_inert_plan_is_checked_where_a_tally_is_asked_for():
    stock, tally = dict(SOURCE.weights()), Tally()
    for name, tensor in padded_weights(stock.items(), plan(CONFIG, tp=1), tally=tally):
        assert tensor is stock[name]
    assert list(tally.names) == list(stock)
    del stock[Q_PROJ]
    with pytest.raises(ValueError, match=f"{Q_PROJ} is missing"):
        list(padded_weights(stock.items(), plan(CONFIG, tp=1), tally=Tally()))


def test_while_the_consumer_works_it_alone_holds_the_tensor():
    """Peak memory is one tensor more: the stream keeps neither the trained nor the padded one."""
    alive = []

    def stream():
        for name, tensor in SOURCE.weights():
            alive.append(weakref.ref(tensor))
            yield name, tensor.clone() if "norm" in name else tensor
            del tensor

    for name, tensor in padded_weights(stream(), plan(CONFIG)):
        last = weakref.ref(tensor)
        del tensor
        gc.collect()
        if "norm" not in name:
            assert last() is None, f"{name} is held by the stream"


SPREADS = st.integers(1, 6).flatmap(
    lambda stock: st.lists(st.none() | st.integers(0, stock - 1), min_size=1, max_size=9).map(
        lambda sources: picked(stock, sources)
    )
)


@given(st.lists(SPREADS, min_size=1, max_size=3), st.sampled_from([0.0, 1.0, -7.0]))
def test_a_tensor_is_its_sources(spreads, fill):
    stock = tuple(spread.stock for spread in spreads)
    shape = tuple(spread.padded for spread in spreads)
    tensor = torch.arange(1, 1 + torch.Size(stock).numel()).view(stock).int()
    entry = Entry("x", Rule("x", ()), stock, shape, tuple(spreads), fill)
    padded = pad_tensor(entry, tensor)
    for index in product(*map(range, shape)):
        sources = [spread.sources[at] for spread, at in zip(spreads, index)]
        want = fill if None in sources else tensor[tuple(sources)]
        assert padded[index] == want, index
    assert (padded is tensor) == all(spread.inert for spread in spreads)


def rms(x, weight, eps):
    return x * torch.rsqrt(x.square().mean() + eps) * weight


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("corrected", [True, False], ids=["corrected", "control"])
def test_a_norm_over_a_padded_width(copies, corrected):
    """Without both corrections the trained entries grow by sqrt(N' / N): 6 % for 48 → 54 heads."""
    spread = picked(48, [*list(range(48)) * copies, *[None] * 6])
    factor = eps_factor("rms_width", spread)
    weight, x = torch.rand(48).double() + 0.5, torch.randn(48).double() * 1e-3
    rule = Rule("q_norm.weight", ("q_heads",), correction="rms_width")
    entry = Entry(
        "x", rule, (48,), (spread.padded,), (spread,), 0.0, "rms_width",
        weight_factor("rms_width", spread) if corrected else 1.0,
    )  # fmt: skip
    wide = torch.cat((x.repeat(copies), torch.zeros(6).double()))
    got = rms(wide, pad_tensor(entry, weight), 1e-6 * (factor if corrected else 1.0))
    error = (got[:48] / rms(x, weight, 1e-6) - 1).abs().max()
    assert (error < 1e-14) == corrected
    assert corrected or error > 0.01


def test_a_norm_over_uneven_copies_is_refused():
    with pytest.raises(ValueError, match="a norm over 2 entries cannot follow uneven copies"):
        eps_factor("rms_width", picked(2, [0, 0, 1, None]))
    assert eps_factor("rms_width", kept(2)) == 1.0


CACHE = [
    ("self_attn.k_proj.k_scale", ()), ("self_attn.v_proj.v_scale", (1,)),
    ("self_attn.k_scale", (11,)), ("self_attn.v_proj.v_scale", (11, 1)),
]  # fmt: skip


@pytest.mark.parametrize(("suffix", "shape"), CACHE)
def test_cache_scales_of_dummy_heads_are_one(suffix, shape):
    entry = Catalogue(plan(CONFIG)).entry(f"model.layers.0.{suffix}", shape, "F32")
    padded = pad_tensor(entry, torch.full(shape, 0.5))
    assert padded.flatten().tolist() == [0.5] * max(sum(shape), 1) if 11 not in shape else True
    if 11 in shape:
        assert padded.flatten().tolist() == [0.5] * 11 + [1.0]


def test_a_cache_scale_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"k_scale has shape \[5\], expected \[\] or \[11\]"):
        Catalogue(plan(CONFIG)).entry("model.layers.0.self_attn.k_scale", (5,), "F32")
