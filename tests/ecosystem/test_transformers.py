"""Transformers' tensor-parallel loading on a process group that is already there.

Transformers starts a group of its own only where none is initialised; its choice for CPU is fixed
(`DISTRIBUTED_BACKEND_MAP["cpu"]`), so a backend of another name is initialised before loading.
"""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

transformers = pytest.importorskip("transformers", minversion="5.24")
distributed = pytest.importorskip("transformers.distributed")

PROMPT = torch.tensor([[3, 14, 15, 9, 26], [5, 35, 8, 9, 7]])


def save_tiny_llama(folder: Path) -> None:
    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        vocab_size=37,
        max_position_embeddings=64,
        initializer_range=0.3,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def load(folder: str, **options) -> torch.nn.Module:
    return transformers.LlamaForCausalLM.from_pretrained(folder, **options).eval()


def generate(model: torch.nn.Module) -> Tensor:
    mask = torch.ones_like(PROMPT)
    return model.generate(PROMPT, attention_mask=mask, max_new_tokens=12, do_sample=False)


def says_the_same(rank: int, world_size: int, folder: str) -> None:
    before = dist.group.WORLD
    config = distributed.DistributedConfig(tp_plan="auto", tp_size=world_size)
    model, plain = load(folder, distributed_config=config), load(folder)
    assert dist.group.WORLD is before, "the initialised group was replaced"
    q = model.model.layers[0].self_attn.q_proj.weight
    assert isinstance(q, DTensor)
    assert q.to_local().shape == (8, 24)
    assert q.device_mesh.size() == world_size

    with torch.no_grad():
        torch.testing.assert_close(model(PROMPT).logits, plain(PROMPT).logits, rtol=1e-5, atol=1e-5)
    assert torch.equal(generate(model), generate(plain))

    loss = model(PROMPT, labels=PROMPT).loss
    want = plain(PROMPT, labels=PROMPT).loss
    loss.backward()
    want.backward()
    torch.testing.assert_close(loss.detach(), want.detach())
    grads = dict(plain.named_parameters())
    for name, p in model.named_parameters():
        got = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        torch.testing.assert_close(
            got, grads[name].grad, rtol=1e-4, atol=1e-5, msg=f"{name}: {{}}".format
        )


def test_tp_plan_auto(ranks, tmp_path: Path):
    save_tiny_llama(tmp_path)
    ranks(says_the_same, str(tmp_path))
