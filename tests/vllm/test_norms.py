"""Epsilons of corrected norms."""

import pytest
import torch

from tp3.vllm import norms


class Norm(torch.nn.Module):
    def __init__(self, name="variance_epsilon"):
        super().__init__()
        setattr(self, name, 1e-6)


def model(name="variance_epsilon"):
    layers = [torch.nn.ModuleDict({"q_norm": Norm(name), "input_norm": Norm(name)}) for _ in "ab"]
    return torch.nn.ModuleDict(
        {"model": torch.nn.ModuleDict({"layers": torch.nn.ModuleList(layers)})}
    )


@pytest.mark.parametrize("name", norms.EPSILONS)
def test_each_layer_once(name):
    made = model(name)
    for _ in range(2):
        assert norms.apply(made, {"model.layers.*.q_norm": 0.5}) == 2
    for layer in made["model"]["layers"]:
        assert (getattr(layer["q_norm"], name), getattr(layer["input_norm"], name)) == (5e-7, 1e-6)


def test_a_model_inside_of_another_is_found():
    outer = torch.nn.ModuleDict({"language_model": model()})
    assert norms.apply(outer, {"model.layers.*.q_norm": 0.5}) == 2


def test_a_norm_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match=r"no module model.layers.\*.k_norm"):
        norms.apply(model(), {"model.layers.*.k_norm": 0.5})


def test_a_norm_without_an_epsilon_is_refused():
    with pytest.raises(ValueError, match="is a Norm without variance_epsilon or eps"):
        norms.apply(model("epsilon"), {"model.layers.*.q_norm": 0.5})
