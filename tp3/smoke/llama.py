"""A tensor-parallel Llama for inference: torch and torch.distributed, nothing else.

It shards as engines do: every rank reads the whole stream of weights and keeps `dim // world_size`
entries. q, k, v, gate and up are column-parallel; o and down row-parallel, each followed by an
all_reduce; the embedding is vocabulary-parallel (all_reduce), and so are the logits (all-gather),
whose padded tail is cut off. One sequence at a time.

Covers llama, mistral, qwen2 (biases), qwen3 (per-head norms). Agrees with
Transformers on each.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from tp3.pad.families import read_model
from tp3.pad.model import HeadAxes
from tp3.smoke.names import all_gather_single

COVERED = ("llama", "mistral", "qwen2", "qwen3")
_COLUMN_PARALLEL = frozenset(
    ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
)
_ROW_PARALLEL = frozenset(("o_proj", "down_proj"))


class Llama:
    """One rank's share of a model; config and weights are padded, `vocab_size` is the real one."""

    def __init__(
        self,
        config: Mapping[str, Any],
        weights: Iterable[tuple[str, Tensor]],
        *,
        vocab_size: int,
        rank: int = 0,
        world_size: int = 1,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        _check(config)
        model = read_model(config)
        (heads,) = (axis for axis in model.axes if isinstance(axis, HeadAxes))
        self.head_dim = heads.head_dim
        self.layers = len(model.layers)
        # an engine gives every rank a KV head where there are fewer heads than ranks
        self.kv_parts = min(heads.kv, world_size)
        self.tags = model.tags
        self.vocab_size = vocab_size
        self.rank = rank
        self.world_size = world_size
        self.eps = float(config["rms_norm_eps"])
        self.context = _context(config)
        self.weights = {
            name: _shard(name, tensor, *self._part(name)).to(device, dtype)
            for name, tensor in weights
        }
        self.inverse_frequencies = inverse_frequencies(config, self.head_dim).to(device)

    @torch.inference_mode()
    def generate(
        self, prompt: list[int], max_new_tokens: int, *, stop: frozenset[int] = frozenset()
    ) -> tuple[list[int], Tensor]:
        """Greedy tokens, ending with one of `stop`, and logits `[len(prompt), vocab_size]`."""
        length = len(prompt) + max_new_tokens
        if not prompt or length > self.context:
            raise ValueError(
                f"prompt and new tokens must be 1 to {self.context} tokens, got {length}"
            )
        cache = self._new_cache(length)
        prompt_logits = logits = self._forward(prompt, cache, 0)
        tokens: list[int] = []
        while len(tokens) < max_new_tokens:
            tokens.append(int(logits[-1].argmax()))
            if tokens[-1] in stop or len(tokens) == max_new_tokens:
                break
            logits = self._forward(tokens[-1:], cache, len(prompt) + len(tokens) - 1)
        return tokens, prompt_logits

    def _new_cache(self, length: int) -> Tensor:
        """`[layers, 2, kv_heads per rank, length, head_dim]`, keys then values."""
        sample = self.weights["model.norm.weight"]
        kv_heads = self.weights["model.layers.0.self_attn.k_proj.weight"].shape[0] // self.head_dim
        return sample.new_empty(self.layers, 2, kv_heads, length, self.head_dim)

    def _part(self, name: str) -> tuple[int, int]:
        """Which part of a tensor this rank keeps, and of how many."""
        if name.split(".")[-2] in ("k_proj", "v_proj"):
            return self.rank * self.kv_parts // self.world_size, self.kv_parts
        return self.rank, self.world_size

    def _forward(self, tokens: list[int], cache: Tensor, start: int) -> Tensor:
        """Logits `[len(tokens), vocab_size]` of the tokens at `start…`; fills their cache."""
        ids = torch.tensor(tokens, device=cache.device)
        rotation = self._rotation(start, len(tokens))
        x = self._embed(ids)
        for layer in range(self.layers):
            block = f"model.layers.{layer}."
            normed = self._norm(x, block + "input_layernorm")
            x = x + self._attention(normed, block + "self_attn.", cache[layer], start, rotation)
            normed = self._norm(x, block + "post_attention_layernorm")
            x = x + self._mlp(normed, block + "mlp.")
        return self._logits(self._norm(x, "model.norm"))

    def _attention(
        self, x: Tensor, block: str, cache: Tensor, start: int, rotation: tuple[Tensor, Tensor]
    ) -> Tensor:
        end = start + x.shape[0]
        q = _rotate(self._heads(x, block + "q_proj", block + "q_norm"), rotation)
        cache[0, :, start:end] = _rotate(
            self._heads(x, block + "k_proj", block + "k_norm"), rotation
        )
        cache[1, :, start:end] = self._heads(x, block + "v_proj", None)
        ratio = q.shape[0] // cache.shape[1]
        keys, values = cache[:, :, :end].repeat_interleave(ratio, dim=1)
        mask = torch.ones(x.shape[0], end, dtype=torch.bool, device=x.device).tril(start)
        scores = q @ keys.transpose(1, 2) * self.head_dim**-0.5
        attended = scores.masked_fill(~mask, -math.inf).softmax(-1) @ values
        return self._row_parallel(attended.transpose(0, 1).flatten(1), block + "o_proj")

    def _mlp(self, x: Tensor, block: str) -> Tensor:
        gate = functional.silu(self._linear(x, block + "gate_proj"))
        return self._row_parallel(gate * self._linear(x, block + "up_proj"), block + "down_proj")

    def _heads(self, x: Tensor, projection: str, norm: str | None) -> Tensor:
        """`[heads per rank, tokens, head_dim]`."""
        heads = self._linear(x, projection).view(x.shape[0], -1, self.head_dim)
        if norm and "qk_norm" in self.tags:
            heads = self._norm(heads, norm)
        return heads.transpose(0, 1)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return functional.linear(
            x, self.weights[name + ".weight"], self.weights.get(name + ".bias")
        )

    def _row_parallel(self, x: Tensor, name: str) -> Tensor:
        y = self._all_reduce(functional.linear(x, self.weights[name + ".weight"]))
        bias = self.weights.get(name + ".bias")
        return y if bias is None else y + bias

    def _embed(self, ids: Tensor) -> Tensor:
        table = self.weights["model.embed_tokens.weight"]
        local = ids - self.rank * table.shape[0]
        mine = (local >= 0) & (local < table.shape[0])
        rows = functional.embedding(local.where(mine, 0), table)
        return self._all_reduce(rows.where(mine[:, None], 0))

    def _logits(self, x: Tensor) -> Tensor:
        head = "model.embed_tokens.weight" if "untied" not in self.tags else "lm_head.weight"
        logits = functional.linear(x, self.weights[head])
        if self.world_size > 1:
            parts = logits.new_empty(self.world_size * logits.shape[0], logits.shape[1])
            all_gather_single(parts, logits)
            logits = parts.view(self.world_size, *logits.shape).transpose(0, 1).flatten(1)
        return logits[:, : self.vocab_size]

    def _all_reduce(self, x: Tensor) -> Tensor:
        if self.world_size > 1:
            dist.all_reduce(x)
        return x

    def _norm(self, x: Tensor, name: str) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weights[name + ".weight"] * normed.to(x.dtype)

    def _rotation(self, start: int, count: int) -> tuple[Tensor, Tensor]:
        positions = torch.arange(start, start + count, device=self.inverse_frequencies.device)
        angles = positions[:, None].float() * self.inverse_frequencies
        angles = torch.cat((angles, angles), dim=-1)
        dtype = self.weights["model.norm.weight"].dtype
        return angles.cos().to(dtype), angles.sin().to(dtype)


def inverse_frequencies(config: Mapping[str, Any], head_dim: int) -> Tensor:
    """RoPE frequencies `[head_dim / 2]`, plain or stretched as Llama 3.1 does."""
    rope = _rope(config)
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies: Tensor = 1.0 / (rope["rope_theta"] ** exponents)
    if rope["rope_type"] == "default":
        return frequencies
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    stretched: Tensor = frequencies * (kept + (1 - kept) / rope["factor"])
    return stretched


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope.setdefault("rope_theta", config.get("rope_theta"))
    rope.setdefault("rope_type", rope.get("type", "default"))
    return rope


def _check(config: Mapping[str, Any]) -> None:
    if config.get("model_type") not in COVERED:
        raise ValueError(
            f"model_type must be one of {', '.join(COVERED)}, got {config.get('model_type')!r}"
        )
    for key in ("rms_norm_eps", "max_position_embeddings"):
        if not isinstance(config.get(key), int | float):
            raise ValueError(f"{key} must be a number, got {config.get(key)!r}")
    rope = _rope(config)
    if rope["rope_type"] not in ("default", "llama3"):
        raise ValueError(f"rope_type must be default or llama3, got {rope['rope_type']!r}")
    if not isinstance(rope["rope_theta"], int | float):
        raise ValueError(f"rope_theta must be a number, got {rope['rope_theta']!r}")
    if config.get("hidden_act") != "silu":
        raise ValueError(f"hidden_act must be silu, got {config.get('hidden_act')!r}")


def _context(config: Mapping[str, Any]) -> int:
    """Tokens for which full attention is what the model was trained with."""
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    return int(min(config["max_position_embeddings"], window or math.inf))


def _rotate(heads: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = rotation
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-second, first), dim=-1) * sin


def _shard(name: str, tensor: Tensor, part: int, parts: int) -> Tensor:
    module, kind = name.split(".")[-2:]
    if module in _COLUMN_PARALLEL:
        dim = 0
    elif module in _ROW_PARALLEL and kind == "weight":
        dim = 1
    else:
        return tensor
    size, rest = divmod(tensor.shape[dim], parts)
    if rest:
        raise ValueError(
            f"{name} has {tensor.shape[dim]} entries, which do not divide by {parts} ranks"
        )
    return tensor.narrow(dim, part * size, size).contiguous() if parts > 1 else tensor
