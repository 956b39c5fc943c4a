"""Padded copies of tiny models in Transformers: the same logits, but for the order of additions."""

from __future__ import annotations

import json

import pytest

from tests.pad.latent import TINY, auto_class, save
from tp3.pad.planner import plan

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

# Every axis of every family grows at five ranks, or at four where five would be whole.
FAMILIES = {
    "deepseek_v3-mtp": 5,
    "deepseek_v32": 5,
    "deepseek_v4": 5,
    "falcon_h1-bias": 4,
    "falcon_h1-nonorm": 4,
    "glm5_next-vl": 4,
    "granitemoehybrid": 3,
    "kimi_k25": 5,
    "kimi_linear": 4,
    "nemotron_h-bias": 4,
    "nemotron_h-latent": 5,
}
# 15 heads of 8 are 3 hidden sizes of 40: Transformers wants a whole mamba_expand.
ASKED = {"granitemoehybrid": {"mamba_heads": 5}}
TOKENS = 96


@pytest.mark.parametrize("tiny", FAMILIES)
def test_the_padded_model_computes_the_same(tmp_path, tiny):
    from safetensors.torch import save_file

    from tp3.pad.weights import padded_weights

    torch.manual_seed(0)
    kind = auto_class(TINY[tiny])
    stock, padded = tmp_path / "stock", tmp_path / "padded"
    padded.mkdir()
    weights = {name: _random(name, tensor) for name, tensor in save(TINY[tiny], stock).items()}
    config = json.loads((stock / "config.json").read_text())
    planned = plan(config, tp=FAMILIES[tiny], local_multiple=ASKED.get(tiny))
    assert not planned.inert
    (padded / "config.json").write_text(json.dumps(planned.padded_config(config)))
    for folder, tensors in (
        (stock, weights),
        (padded, dict(padded_weights(weights.items(), planned))),
    ):
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    expected, got = _logits(kind, stock), _logits(kind, padded)
    assert expected.abs().max() > 1
    worst = (expected - got).abs().max()
    assert worst < 2e-5, f"logits differ by {worst}"


def _random(name, tensor):
    """Large enough for every part to matter, norms near 1."""
    if not tensor.is_floating_point():
        return torch.randint_like(tensor, 4)
    if name.endswith("A_log"):
        return torch.rand_like(tensor)
    drawn = 0.3 * torch.randn_like(tensor)
    return drawn + 1 if "norm" in name and name.endswith("weight") else drawn


def _logits(kind, folder):
    model, info = kind.from_pretrained(
        folder,
        dtype=torch.float32,
        output_loading_info=True,
        experts_implementation="eager",
    )
    assert not any(info.values()), info
    _scale_eps(model, json.loads((folder / "config.json").read_text()).get("tp3", {}))
    tokens = torch.arange(1, 33).reshape(2, 16)
    with torch.no_grad():
        return model.eval()(input_ids=tokens, use_cache=False).logits[..., :TOKENS].double()


def _scale_eps(model, padding):
    """What a host does for norms over a padded width."""
    for pattern, factor in padding.get("norm_eps_factors", {}).items():
        end = pattern.split("*")[-1]
        norms = [module for name, module in model.named_modules() if name.endswith(end)]
        assert norms, pattern
        for norm in norms:
            norm.variance_epsilon *= factor
