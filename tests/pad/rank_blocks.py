"""The blocks of a decoder as the ranks of an engine run them, on shards of the padded tensors.

Every block takes hidden states that all ranks have, [T, hidden], and returns what they have after
the all_reduce. A bias of a row-parallel projection is added once, after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.pad.rank_math import attend, convolved, delta_rule, mamba2, rms, rotate
from tests.pad.shards import Ranks

Tables = tuple[Tensor, Tensor]
Router = Callable[[Ranks, str, Tensor], tuple[Tensor, Tensor]]
Expert = Callable[[int, int, Tensor], Tensor]


def attention(
    ranks: Ranks, at: str, x: Tensor, tables: Tables | None, scale: float, **how: Any
) -> Tensor:
    """Grouped-query attention. how: ``gated``, ``norm`` ("head", "width" or none), ``window``."""
    head_dim, gated = ranks.head_dim, how.get("gated", False)
    q, k, v = [], [], []
    for rank in range(ranks.tp):
        parts = {name: ranks.heads(f"{at}{name}_proj.weight", rank, head_dim) for name in "kv"}
        parts["q"] = ranks.cut(at + "q_proj.weight", rank)
        for name, found in (("q", q), ("k", k), ("v", v)):
            y = x @ parts[name].T
            bias = f"{at}{name}_proj.bias"
            if bias in ranks:
                y = y + (
                    ranks.cut(bias, rank) if name == "q" else ranks.heads(bias, rank, head_dim)
                )
            found.append(y.unflatten(-1, (-1, head_dim * (2 if gated and name == "q" else 1))))
    gates = [each[..., head_dim:] for each in q] if gated else None
    q = [each[..., :head_dim] for each in q]
    q, k = _normed(ranks, at + "q_norm", q, how), _normed(ranks, at + "k_norm", k, how)

    def partial(rank: int) -> Tensor:
        query, key = q[rank], k[rank]
        if tables is not None:
            query, key = rotate(query, tables), rotate(key, tables)
        sinks = ranks.cut(at + "sinks", rank) if at + "sinks" in ranks else None
        y = attend(query, key, v[rank], scale, window=how.get("window"), sinks=sinks)
        if gates is not None:
            y = y * gates[rank].sigmoid()
        return y.flatten(1) @ ranks.cut(at + "o_proj.weight", rank, 1).T

    return _with_bias(ranks, at + "o_proj.bias", ranks.summed(partial))


def _normed(ranks: Ranks, name: str, heads: list[Tensor], how: dict[str, Any]) -> list[Tensor]:
    """Norms of queries or keys. Over the full width the ranks average the mean squares of their
    heads, which is right too where several hold the same KV head.
    """
    norm, weight = how.get("norm", ""), name + ".weight"
    if norm == "head":
        return [rms(each, 1 + ranks[weight], ranks.eps(name)) for each in heads]
    if norm != "width":
        return heads
    flat = [each.flatten(1) for each in heads]
    total = ranks.summed(lambda rank: flat[rank].square().mean(-1, keepdim=True))
    return [
        rms(
            flat[rank],
            ranks.heads(weight, rank, ranks.head_dim),
            ranks.eps(name),
            total / ranks.tp,
        ).unflatten(-1, heads[rank].shape[1:])
        for rank in range(ranks.tp)
    ]


def latent_attention(ranks: Ranks, at: str, x: Tensor, tables: Tables) -> Tensor:
    """MLA: the latents are every rank's; the heads made of them are cut."""
    c = ranks.config
    nope, rope, value = (c[k] for k in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    lora = c["kv_lora_rank"]
    queries = rms(x @ ranks[at + "q_a_proj.weight"].T, ranks[at + "q_a_layernorm.weight"], 1e-6)
    latent, shared = (x @ ranks[at + "kv_a_proj_with_mqa.weight"].T).split([lora, rope], -1)
    latent = rms(latent, ranks[at + "kv_a_layernorm.weight"], 1e-6)
    shared = rotate(shared[:, None], tables, interleaved=True)

    def partial(rank: int) -> Tensor:
        q = (queries @ ranks.cut(at + "q_b_proj.weight", rank).T).unflatten(-1, (-1, nope + rope))
        turned = rotate(q[..., nope:], tables, interleaved=True)
        kv = latent @ ranks.cut(at + "kv_b_proj.weight", rank).T
        k, v = kv.unflatten(-1, (-1, nope + value)).split([nope, value], -1)
        k = torch.cat([k, shared.expand(-1, k.shape[1], -1)], -1)
        y = attend(torch.cat([q[..., :nope], turned], -1), k, v, (nope + rope) ** -0.5)
        return y.flatten(1) @ ranks.cut(at + "o_proj.weight", rank, 1).T

    return ranks.summed(partial)


def delta_net(ranks: Ranks, at: str, x: Tensor) -> Tensor:
    """Qwen3-Next's gated delta net: projections interleaved by key head, [q | k | v z] flat in the
    convolution.
    """
    c = ranks.config
    keys, values = (c[f"linear_num_{kind}_heads"] for kind in ("key", "value"))
    key_dim, value_dim = (c[f"linear_{kind}_head_dim"] for kind in ("key", "value"))
    each = values // keys

    def partial(rank: int) -> Tensor:
        qkvz = (x @ ranks.cut(at + "in_proj_qkvz.weight", rank).T).unflatten(
            -1, (keys // ranks.tp, -1)
        )
        q, k, v, z = (
            part.flatten(1)
            for part in qkvz.split([key_dim, key_dim, each * value_dim, each * value_dim], -1)
        )
        ba = (x @ ranks.cut(at + "in_proj_ba.weight", rank).T).unflatten(-1, (keys // ranks.tp, -1))
        beta, step = (part.flatten(1) for part in ba.split([each, each], -1))
        widths = [keys * key_dim, keys * key_dim, values * value_dim]
        mixed = torch.cat([q, k, v], -1)
        mixed = convolved(mixed, ranks.cut(at + "conv1d.weight", rank, 0, widths))
        q, k, v = mixed.split([width // ranks.tp for width in widths], -1)
        slope = ranks.cut(at + "A_log", rank).exp()
        decay = (-slope * F.softplus(step + ranks.cut(at + "dt_bias", rank))).exp()
        y = delta_rule(
            q.unflatten(-1, (-1, key_dim)),
            k.unflatten(-1, (-1, key_dim)),
            v.unflatten(-1, (-1, value_dim)),
            decay,
            beta.sigmoid(),
        )
        y = rms(y, ranks[at + "norm.weight"], ranks.eps(at + "norm")).flatten(1) * F.silu(z)
        return y @ ranks.cut(at + "out_proj.weight", rank, 1).T

    return ranks.summed(partial)


def mamba_mixer(ranks: Ranks, at: str, x: Tensor) -> Tensor:
    """Mamba-2 of one group: B and C are every rank's, and the ranks sum the squares of the norm."""
    c = ranks.config
    heads, head_dim, state = c["mamba_n_heads"], c["mamba_d_head"], c["mamba_d_state"]
    width, local = heads * head_dim, heads * head_dim // ranks.tp
    outputs = []
    for rank in range(ranks.tp):
        rows = ranks.cut(at + "in_proj.weight", rank, 0, [width, width, -state, -state, heads])
        z, mixed, step = (x @ rows.T).split([local, local + 2 * state, heads // ranks.tp], -1)
        kept = [width, -state, -state]
        mixed = convolved(
            mixed,
            ranks.cut(at + "conv1d.weight", rank, 0, kept),
            ranks.cut(at + "conv1d.bias", rank, 0, kept),
        )
        y, b, d = mixed.split([local, state, state], -1)
        step = F.softplus(step + ranks.cut(at + "dt_bias", rank))
        slope = -ranks.cut(at + "A_log", rank).exp()
        y = mamba2(y.unflatten(-1, (-1, head_dim)), step, slope, b, d, ranks.cut(at + "D", rank))
        outputs.append(y.flatten(1) * F.silu(z))
    total = ranks.summed(lambda rank: outputs[rank].square().sum(-1, keepdim=True))
    squares, eps = total / width, ranks.eps(at + "norm")

    def partial(rank: int) -> Tensor:
        y = rms(outputs[rank], ranks.cut(at + "norm.weight", rank), eps, squares)
        return y @ ranks.cut(at + "out_proj.weight", rank, 1).T

    return ranks.summed(partial)


def mlp(ranks: Ranks, at: str, x: Tensor) -> Tensor:
    """A gated MLP, gate and up apart."""

    def partial(rank: int) -> Tensor:
        gate, up = (
            _with_bias(ranks, f"{at}{name}.bias", x @ ranks.cut(f"{at}{name}.weight", rank).T, rank)
            for name in ("gate_proj", "up_proj")
        )
        return (F.silu(gate) * up) @ ranks.cut(at + "down_proj.weight", rank, 1).T

    return _with_bias(ranks, at + "down_proj.bias", ranks.summed(partial))


def fused_mlp(ranks: Ranks, at: str, x: Tensor) -> Tensor:
    """A gated MLP whose gate lies above its up projection."""
    width = ranks[at + "output_linear.weight"].shape[1]

    def partial(rank: int) -> Tensor:
        rows = ranks.cut(at + "input_linear.weight", rank, 0, [width, width])
        gate, up = (x @ rows.T).chunk(2, -1)
        return (F.silu(gate) * up) @ ranks.cut(at + "output_linear.weight", rank, 1).T

    return ranks.summed(partial)


def experts(ranks: Ranks, x: Tensor, routed: tuple[Tensor, Tensor], expert: Expert) -> Tensor:
    """Every token through its experts, each of which all ranks share. routed: weights and numbers
    of the experts, [T, chosen]. expert: from a rank, a number and tokens to a partial result.
    """
    weights, chosen = routed

    def partial(rank: int) -> Tensor:
        y = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            share = (weights * (chosen == number)).sum(-1)
            mine = share.nonzero()[:, 0]
            y[mine] += share[mine, None] * expert(rank, number, x[mine])
        return y

    return ranks.summed(partial)


def _with_bias(ranks: Ranks, name: str, y: Tensor, rank: int | None = None) -> Tensor:
    if name not in ranks:
        return y
    return y + (ranks[name] if rank is None else ranks.cut(name, rank))
