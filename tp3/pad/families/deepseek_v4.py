"""DeepSeek-V4: one KV head, output projections by groups of heads, compressed caches.

``wo_a`` maps each group of heads to ``o_lora_rank`` entries of its own: heads are padded by whole
groups. A layer's compress ratio is 0 (sliding window alone), 4 (its compressor overlaps and has an
indexer) or 128. Layers before ``num_hash_layers`` route by a table over the vocabulary. Names and
shapes: the checkpoints on the Hub, and Transformers 5.24, ``models/deepseek_v4``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tp3.pad.families.config import Config
from tp3.pad.families.latent import count, experts, paths
from tp3.pad.families.llama import NO_HEAD, NO_LOGIT, NO_QUERY, NO_TOKEN
from tp3.pad.model import Model, Rule, Tags, Units, Vocabulary, Width

RATIOS = {0: "sliding", 4: "overlapping", 128: "compressed"}
NAMES = ("w1", "w3", "w2")
NO_GROUP = "a dummy group of heads returns 0"


def read(values: Mapping[str, Any]) -> Model:
    """The model of a DeepSeek-V4 config (``deepseek_v4``, ``deepseek_ref``)."""
    config = Config(values)
    heads, groups = config.size("num_attention_heads"), config.size("o_groups")
    if heads % groups:
        raise ValueError(
            f"num_attention_heads must be a multiple of o_groups, got {heads} and {groups}"
        )
    layers = config.size("num_hidden_layers")
    extra = count(config, "num_nextn_predict_layers")
    number, head_dim = config.size("n_routed_experts"), config.size("head_dim")
    multiple = config.size("hc_mult")
    return Model(
        model_type=str(values["model_type"]),
        axes=(
            Units("o_groups", groups, {"q_heads": heads // groups}),
            Width(
                "moe_intermediate",
                config.size("moe_intermediate_size"),
                {"shared_intermediate": max(count(config, "n_shared_experts"), 1)},
            ),
            Vocabulary("vocab", config.size("vocab_size")),
        ),
        sizes={
            "hidden": config.size("hidden_size"),
            "head_dim": head_dim,
            "group": heads // groups * head_dim,
            "q_lora_rank": config.size("q_lora_rank"),
            "o_lora_rank": config.size("o_lora_rank"),
            "index_heads": config.size("index_n_heads"),
            "index_head_dim": config.size("index_head_dim"),
            "experts": number,
            "chosen": config.size("num_experts_per_tok"),
            "streams": multiple,
            "mixes": (2 + multiple) * multiple,
            "entries_overlapping": head_dim // 4,
            "entries_compressed": head_dim // 128 or 1,
        },
        layers=_layers(config, layers),
        rules=(*_frame(), *_block("layers.*."), *_predictions(extra)),
        paths=paths(
            config,
            q_heads="num_attention_heads",
            o_groups="o_groups",
            moe_intermediate="moe_intermediate_size",
            vocab="vocab_size",
        ),
        tags=frozenset({"untied", "shared"} if count(config, "n_shared_experts") else {"untied"}),
        experts=number,
        kv_entries={
            "overlapping": "entries_overlapping",
            "compressed": "entries_compressed",
        },
    )


def _layers(config: Config, layers: int) -> tuple[Tags, ...]:
    hashed = count(config, "num_hash_layers", 3)
    kinds = config.values.get("mlp_layer_types")
    if kinds is not None:
        hashed = list(kinds).count("hash_moe")
    routes = ["hash"] * min(hashed, layers) + ["router_bias"] * max(layers - hashed, 0)
    return tuple(
        frozenset({kind, route})
        for kind, route in zip(_attention_kinds(config, layers), routes, strict=True)
    )


def _attention_kinds(config: Config, layers: int) -> list[str]:
    ratios = config.values.get("compress_ratios")
    if ratios is None:
        names = {
            "sliding_attention": "sliding",
            "compressed_sparse_attention": "overlapping",
            "heavily_compressed_attention": "compressed",
        }
        kinds = [names.get(name) for name in config.values.get("layer_types") or ()]
    else:
        kinds = [RATIOS.get(ratio) for ratio in ratios]
    if len(kinds) < layers or None in kinds:
        raise ValueError(
            f"compress_ratios must give 0, 4 or 128 for each of {layers} layers, got {ratios}"
        )
    return [str(kind) for kind in kinds[:layers]]


def _frame() -> tuple[Rule, ...]:
    return (
        Rule("embed.weight", ("vocab", "hidden"), NO_TOKEN, plain=True),
        Rule("head.weight", ("vocab", "hidden"), NO_LOGIT, plain=True),
        Rule("norm.weight", ("hidden",)),
        *_hyper_head(""),
    )


def _hyper_head(at: str) -> tuple[Rule, ...]:
    return (
        Rule(at + "hc_head_fn", ("streams", "streams*hidden"), plain=True),
        Rule(at + "hc_head_base", ("streams",)),
        Rule(at + "hc_head_scale", ("1",)),
    )


def hyper(at: str) -> tuple[Rule, ...]:
    """Hyper-connections around attention and MLP: streams of the hidden size, which stays."""
    return tuple(
        Rule(f"{at}hc_{part}_{name}", dims, plain=True)
        for part in ("attn", "ffn")
        for name, dims in (
            ("fn", ("mixes", "streams*hidden")),
            ("base", ("mixes",)),
            ("scale", ("3",)),
        )
    )


def _block(layer: str) -> tuple[Rule, ...]:
    at = layer + "attn."
    moe = experts(layer + "ffn.", NAMES, (), shared_names=NAMES, bias="gate.bias")
    return (
        Rule(at + "wq_a.weight", ("q_lora_rank", "hidden")),
        Rule(at + "q_norm.weight", ("q_lora_rank",)),
        Rule(at + "wq_b.weight", ("q_heads*head_dim", "q_lora_rank"), NO_QUERY),
        Rule(at + "wkv.weight", ("head_dim", "hidden")),
        Rule(at + "kv_norm.weight", ("head_dim",)),
        Rule(at + "attn_sink", ("q_heads",), "finite: the values of a dummy head go nowhere"),
        Rule(at + "wo_a.weight", ("o_groups*o_lora_rank", "group"), NO_GROUP),
        Rule(at + "wo_b.weight", ("hidden", "o_groups*o_lora_rank"), NO_HEAD),
        *_compressor(at + "compressor.", "4", "2*head_dim", "head_dim", "overlapping"),
        *_compressor(at + "compressor.", "128", "head_dim", "head_dim", "compressed"),
        *_compressor(
            at + "indexer.compressor.", "4", "2*index_head_dim", "index_head_dim", "overlapping"
        ),
        Rule(
            at + "indexer.wq_b.weight",
            ("index_heads*index_head_dim", "q_lora_rank"),
            when=("overlapping",),
        ),
        Rule(
            at + "indexer.weights_proj.weight",
            ("index_heads", "hidden"),
            when=("overlapping",),
            plain=True,
        ),
        Rule(layer + "attn_norm.weight", ("hidden",)),
        Rule(layer + "ffn_norm.weight", ("hidden",)),
        *hyper(layer),
        *moe,
        Rule(layer + "ffn.gate.tid2eid", ("vocab", "chosen"), NO_TOKEN, ("hash",), plain=True),
    )


def _compressor(at: str, ratio: str, width: str, head: str, when: str) -> tuple[Rule, ...]:
    return (
        Rule(at + "wkv.weight", (width, "hidden"), when=(when,), plain=True),
        Rule(at + "wgate.weight", (width, "hidden"), when=(when,), plain=True),
        Rule(at + "ape", (ratio, width), when=(when,), plain=True),
        Rule(at + "norm.weight", (head,), when=(when,)),
    )


def _predictions(number: int) -> tuple[Rule, ...]:
    """Blocks ``mtp.N`` without a compressor, that share embedding and head."""
    rules: list[Rule] = []
    for layer in range(number):
        at = f"mtp.{layer}."
        for rule in _block(at):
            if not {"overlapping", "compressed", "hash"} & set(rule.when):
                when = tuple(tag for tag in rule.when if tag != "router_bias")
                rules.append(replace(rule, when=when))
        rules += [
            Rule(at + "e_proj.weight", ("hidden", "hidden")),
            Rule(at + "h_proj.weight", ("hidden", "hidden")),
            *(Rule(f"{at}{name}.weight", ("hidden",)) for name in ("enorm", "hnorm", "norm")),
            *_hyper_head(at),
        ]
    return tuple(replace(rule, spare=True) for rule in rules)
