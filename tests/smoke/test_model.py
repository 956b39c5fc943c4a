"""The padded model on W ranks against one rank, and against Transformers as an outsider.

Logits are held to fp64: a run in fp32 may err at most twice as far as Transformers' own fp32 run
does.
"""

import os
from dataclasses import dataclass

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from tp3.comm.launch import launch
from tp3.pad import padded_weights, plan
from tp3.smoke.llama import Llama, inverse_frequencies
from tp3.smoke.model import QUESTIONS, chat_tokens, compare, distance, run_model
from tp3.smoke.site import Site
from tp3.smoke.source import Folder, RandomLlama

torch.set_num_threads(1)  # ranks are forked, and a pool of threads does not survive that

BACKEND = os.environ.get("TP3_TEST_BACKEND", "r4d")
SIZES = [2, 3, 4, 5, 7]
PROMPTS = [[5, 17, 300, 2, 98, 41, 7, 7, 250], list(range(100, 120))]
NEW_TOKENS = 16


@dataclass(frozen=True)
class Reference:
    """What Transformers says: greedy tokens, logits in fp64, the error of its own fp32 logits."""

    tokens: list
    exact: list
    rounding: float


class FewKVHeads(RandomLlama):
    def config(self):
        return super().config() | {"num_attention_heads": 8, "num_key_value_heads": 2}


def reference_of(model, prompts, max_new_tokens=NEW_TOKENS):
    tokens = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            do_sample=False,
        )
        tokens.append(made[0, len(prompt) :].tolist())
    single = logits_of(model, prompts)
    exact = logits_of(model.double(), prompts)
    return Reference(tokens, exact, distance(single, exact).logit)


@torch.inference_mode()
def logits_of(model, prompts):
    return [model(torch.tensor([prompt])).logits[0].numpy() for prompt in prompts]


def check_against(reference, ranks):
    for rank, result in enumerate(ranks):
        assert result["tokens"] == reference.tokens, f"rank {rank}"
        assert result["digest"] == ranks[0]["digest"], f"rank {rank}"
    error = distance(ranks[0]["logits"], reference.exact).logit
    assert error <= 2 * reference.rounding, f"{error:.2e} > 2 × {reference.rounding:.2e}"


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def random_llama(request):
    source = RandomLlama(tied=request.param)
    model = LlamaForCausalLM(LlamaConfig(**source.config(), eos_token_id=None)).eval()
    # a tied head has no weight of its own
    model.load_state_dict(dict(source.weights()), strict=not source.tied)
    return source, reference_of(model, PROMPTS)


@pytest.mark.parametrize("world_size", [1, *SIZES])
def test_random_llama(random_llama, world_size):
    source, reference = random_llama
    arguments = (source, PROMPTS, NEW_TOKENS)
    check_against(reference, launch(compare, world_size, *arguments, backend=BACKEND))


@pytest.fixture(scope="module")
def smollm2_reference(smollm2):
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    prompts = [chat_tokens(tokenizer, question) for question in QUESTIONS]
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    reference = reference_of(model, prompts)
    stock = compare(0, 1, Folder(smollm2), prompts, NEW_TOKENS)
    check_against(reference, [stock])
    assert "Paris" in tokenizer.decode(stock["tokens"][0])
    return prompts, reference


@pytest.mark.timeout(300)
@pytest.mark.parametrize("world_size", SIZES)
def test_smollm2(smollm2, smollm2_reference, world_size):
    prompts, reference = smollm2_reference
    arguments = (Folder(smollm2), prompts, NEW_TOKENS)
    check_against(reference, launch(compare, world_size, *arguments, backend=BACKEND, timeout=200))


SMALL = {
    "hidden_size": 96,
    "intermediate_size": 130,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 333,
    "max_position_embeddings": 256,
    "eos_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(
            LlamaConfig(**SMALL, rope_parameters=LLAMA3_ROPE, attention_bias=True, mlp_bias=True),
            id="llama-3.1-with-biases",
        ),
        pytest.param(MistralConfig(**SMALL, head_dim=32, sliding_window=None), id="mistral"),
        pytest.param(Qwen2Config(**SMALL), id="qwen2"),
        pytest.param(Qwen3Config(**SMALL, head_dim=32, tie_word_embeddings=True), id="qwen3"),
    ],
)
def test_family_at_three_ranks(config, tmp_path):
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(generator=generator).mul_(weight.shape[-1] ** -0.5)
            if "norm" in name:
                weight.add_(1)
    model.save_pretrained(tmp_path, max_shard_size="200KB")
    reference = reference_of(model, PROMPTS)
    arguments = (Folder(tmp_path), PROMPTS, NEW_TOKENS)
    check_against(reference, launch(compare, 3, *arguments, backend=BACKEND))


def test_fewer_kv_heads_than_ranks():
    """Engines give two ranks the same KV head; nothing is padded for that."""
    source = FewKVHeads()
    assert plan(source.config(), tp=4).padded_sizes["kv_heads"] == 2
    stock = compare(0, 1, source, PROMPTS, NEW_TOKENS)
    ranks = launch(compare, 4, source, PROMPTS, NEW_TOKENS, backend=BACKEND)
    assert [rank["tokens"] for rank in ranks] == [stock["tokens"]] * 4


def test_rows_of_the_smoke_command():
    told = []
    rows = run_model(3, backend=BACKEND, site=Site("cpu"), progress=told.append)
    assert [row["check"] for row in rows] == [
        "plan q_heads",
        "plan kv_heads",
        "plan intermediate",
        "plan vocab",
        "model tokens",
        "model ranks",
        "model max |Δ logit|",
        "model max |Δ logprob|",
    ]
    assert all(row["ok"] for row in rows), rows
    assert len(told) == 2


@pytest.mark.parametrize(("vocab_size", "first"), [(333, 0), (384, 333)], ids=["real", "control"])
def test_padded_logits_never_win(vocab_size, first):
    """Every real logit is negative here: an entry of the padded tail, which is 0, would win."""
    source = RandomLlama()
    planned = plan(source.config(), tp=3)
    weights = dict(source.weights())
    for name, tensor in weights.items():
        if "o_proj" in name or "down_proj" in name:
            tensor.zero_()
    weights["model.embed_tokens.weight"].abs_()
    weights["lm_head.weight"].abs_().neg_()
    padded = padded_weights(weights.items(), planned)
    model = Llama(planned.padded_config(source.config()), padded, vocab_size=vocab_size)
    tokens, logits = model.generate(PROMPTS[0], 1)
    assert logits.shape[1] == vocab_size
    assert first <= tokens[0] < vocab_size


def test_an_unpadded_model_is_refused_by_its_first_odd_tensor():
    source = RandomLlama()
    with pytest.raises(
        ValueError, match=r"q_proj.weight has 176 entries, which do not divide by 3"
    ):
        Llama(source.config(), source.weights(), vocab_size=333, world_size=3)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"rope_scaling": {"type": "yarn"}}, "rope_type must be default or llama3, got 'yarn'"),
        ({"rope_theta": None}, "rope_theta must be a number, got None"),
        ({"rms_norm_eps": None}, "rms_norm_eps must be a number, got None"),
        ({"hidden_act": "gelu"}, "hidden_act must be silu, got 'gelu'"),
        ({"model_type": "gemma2"}, "model_type must be one of llama, .*got 'gemma2'"),
    ],
)
def test_a_model_it_cannot_run_is_refused(change, sentence):
    source = RandomLlama()
    with pytest.raises(ValueError, match=sentence):
        Llama(source.config() | change, source.weights(), vocab_size=333)


def test_more_tokens_than_the_window_are_refused():
    source = RandomLlama()
    config = source.config() | {"sliding_window": 16}
    model = Llama(config, source.weights(), vocab_size=333)
    with pytest.raises(ValueError, match="must be 1 to 16 tokens, got 17"):
        model.generate([1] * 9, 8)


def test_old_and_new_rope_keys_mean_the_same():
    old = {
        "rope_theta": 500.0,
        "rope_scaling": {k: v for k, v in LLAMA3_ROPE.items() if k != "rope_theta"},
    }
    new = {"rope_parameters": LLAMA3_ROPE}
    assert torch.equal(inverse_frequencies(old, 24), inverse_frequencies(new, 24))
