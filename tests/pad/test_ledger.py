"""What a rank holds: layers of one kind counted once, those that a format tells apart, apart."""

import pytest

from tests.pad.brute import CONFIGS
from tp3.pad import ledger, plan

LLAMA_70B = CONFIGS["Meta-Llama-3.1-70B"]


def test_layers_that_are_alike_are_counted_once(monkeypatch):
    """11,000 layers are planned like two: each kind of layer is looked at once and multiplied."""
    looked, real = [], ledger.sections

    def counting(*extent):
        looked.append(extent)
        return real(*extent)

    monkeypatch.setattr(ledger, "sections", counting)
    found = {}
    for layers in (1, 2, 11_000):
        looked.clear()
        held = plan(LLAMA_70B | {"num_hidden_layers": layers}).ledger
        found[layers] = len(looked), held.weight_bytes, held.kv_bytes_per_token
    (one, least, cached), (two, twice, _), (many, bytes_held, all_cached) = found.values()
    assert one == two == many
    assert bytes_held == least + 10_999 * (twice - least)
    assert all_cached == 11_000 * cached


@pytest.mark.parametrize(
    ("name", "plain"),
    [("model.layers.1", 1), ("model.layers.[13]", 2), (r"re:model.layers.[0-2]\..*", 3),
     (r"re:model\.layers\.\d\..*", 10), ("model.layers.1?", 2)],
)  # fmt: skip
def test_layers_that_a_format_tells_apart_are_counted_apart(name, plain):
    """A layer that stays bf16 takes twice the bytes of its fp8 neighbours, whatever names it."""
    held = []
    for ignored in ([], [name]):
        quantised = {"quant_method": "fp8", "modules_to_not_convert": ignored}
        config = LLAMA_70B | {"num_hidden_layers": 12, "quantization_config": quantised}
        held.append(plan(config).ledger.weight_bytes)
    linear = 8192 * 128 * (24 + 3 + 3 + 24) + 3 * 8192 * 28704 // 3
    assert held[1] - held[0] == plain * linear


def test_one_quantised_layer_is_enough_to_want_whole_blocks():
    quantised = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    for layer in (0, 1):
        quantised |= {"modules_to_not_convert": [f"model.layers.{layer}"]}
        config = LLAMA_70B | {"num_hidden_layers": 2, "quantization_config": quantised}
        assert plan(config).padded_sizes["intermediate"] == 28800
