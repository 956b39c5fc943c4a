"""What a `config.json` says about a model's sizes: the first step of a plan, without torch.

A missing or malformed field is a ValueError of one sentence. The only values that may be absent
are those that Transformers itself derives for the family: `head_dim` (hidden_size /
num_attention_heads), `num_key_value_heads` (one per query head, llama only), and the flags
`tie_word_embeddings`, `attention_bias`, `mlp_bias` (false).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path


@dataclass(frozen=True)
class Family:
    """How a `model_type` departs from Llama; a bias is `"always"`, `"never"` or a config key."""

    qkv_bias: str
    o_bias: str
    mlp_bias: str
    qk_norm: bool = False
    derives_head_dim: bool = True
    derives_kv_heads: bool = False


FAMILIES = {
    "llama": Family("attention_bias", "attention_bias", "mlp_bias", derives_kv_heads=True),
    "mistral": Family("never", "never", "never"),
    "qwen2": Family("always", "never", "never"),
    "qwen3": Family(
        "attention_bias", "attention_bias", "never", qk_norm=True, derives_head_dim=False
    ),
}


@dataclass(frozen=True)
class Shape:
    """The sizes of one decoder; heads and layers are counts, the others widths."""

    model_type: str
    layers: int
    hidden: int
    q_heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool

    def __post_init__(self) -> None:
        if self.q_heads % self.kv_heads:
            raise ValueError(
                f"num_attention_heads must be a multiple of num_key_value_heads, "
                f"got {self.q_heads} and {self.kv_heads}"
            )

    @property
    def untied(self) -> bool:
        return not self.tied

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> "Shape":
        model_type = config.get("model_type")
        if not isinstance(model_type, str) or model_type not in FAMILIES:
            allowed = ", ".join(FAMILIES)
            raise ValueError(f"model_type must be one of {allowed}, got {model_type!r}")
        if config.get("quantization_config"):
            raise ValueError("quantization_config must be absent: only plain weights are padded")
        family = FAMILIES[model_type]
        hidden = _size(config, "hidden_size")
        q_heads = _size(config, "num_attention_heads")
        return cls(
            model_type=model_type,
            layers=_size(config, "num_hidden_layers"),
            hidden=hidden,
            q_heads=q_heads,
            kv_heads=_kv_heads(config, q_heads, family),
            head_dim=_head_dim(config, hidden, q_heads, family),
            intermediate=_size(config, "intermediate_size"),
            vocab=_size(config, "vocab_size"),
            tied=_flag(config, "tie_word_embeddings"),
            qkv_bias=_flag(config, family.qkv_bias),
            o_bias=_flag(config, family.o_bias),
            mlp_bias=_flag(config, family.mlp_bias),
            qk_norm=family.qk_norm,
        )


def read_config(path: str | PathLike[str]) -> dict[str, object]:
    """The config of a checkpoint folder, or of a `config.json` named directly."""
    file = Path(path)
    if not file.exists():
        raise ValueError(f"{path} does not exist")
    if file.is_dir():
        file = file / "config.json"
        if not file.exists():
            raise ValueError(f"{path} has no config.json")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file} must hold a JSON object, got {type(config).__name__}")
    return config


def _size(config: Mapping[str, object], key: str) -> int:
    value = config.get(key)
    if value is None:
        raise ValueError(f"{key} is missing from the config")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{key} must be a positive integer, got {value!r}")
    return value


def _flag(config: Mapping[str, object], key: str) -> bool:
    if key in ("always", "never"):
        return key == "always"
    value = config.get(key, False)
    if not isinstance(value, bool):
        raise ValueError(f"{key} must be true or false, got {value!r}")
    return value


def _kv_heads(config: Mapping[str, object], q_heads: int, family: Family) -> int:
    if family.derives_kv_heads and config.get("num_key_value_heads") is None:
        return q_heads
    return _size(config, "num_key_value_heads")


def _head_dim(config: Mapping[str, object], hidden: int, q_heads: int, family: Family) -> int:
    if not family.derives_head_dim or config.get("head_dim") is not None:
        return _size(config, "head_dim")
    if hidden % q_heads:
        raise ValueError(
            f"head_dim is missing and hidden_size {hidden} does not divide "
            f"by num_attention_heads {q_heads}"
        )
    return hidden // q_heads
