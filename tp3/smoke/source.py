"""Where the smoke test's model comes from: a Transformers folder, or random weights.

A source is small and pickles: every rank reads or makes the weights itself.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from tp3.pad import plan, read_config, read_weights
from tp3.pad.extent import spread_of


class Source(Protocol):
    """A config, its weights, and the tokens that end a text."""

    def config(self) -> dict[str, Any]: ...

    def weights(self) -> Iterator[tuple[str, Tensor]]: ...

    def stop(self) -> frozenset[int]: ...


@dataclass(frozen=True)
class Folder:
    """A checkpoint as Transformers saves it."""

    path: Path

    def config(self) -> dict[str, Any]:
        return read_config(self.path)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return read_weights(self.path)

    def stop(self) -> frozenset[int]:
        file = self.path / "generation_config.json"
        generation = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        ids = generation.get("eos_token_id", self.config().get("eos_token_id"))
        return frozenset(ids if isinstance(ids, list) else [] if ids is None else [ids])


@dataclass(frozen=True)
class RandomLlama:
    """Seeded weights, scaled to keep activations near 1; heads divide by none of 2 to 8."""

    seed: int = 0
    tied: bool = False

    def config(self) -> dict[str, Any]:
        return {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": 176,
            "intermediate_size": 499,
            "num_hidden_layers": 2,
            "num_attention_heads": 22,
            "num_key_value_heads": 11,
            "vocab_size": 333,
            "max_position_embeddings": 512,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": self.tied,
        }

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        generator = torch.Generator().manual_seed(self.seed)
        planned = plan(self.config(), tp=1)
        model = planned.model
        for rule in model.rules:
            size = [spread_of(dim, model.sizes, planned.spreads).stock for dim in rule.dims]
            for layer in () if rule.spare else model.places(rule):
                noise = torch.randn(size, generator=generator)
                name = rule.pattern.replace("*", str(layer))
                yield name, noise * size[-1] ** -0.5 if len(size) > 1 else 1 + noise / 10

    def stop(self) -> frozenset[int]:
        return frozenset()
