"""Published configs at every size: whole shares, the trained map, and nothing smaller serves."""

from __future__ import annotations

from functools import lru_cache
from itertools import product

import pytest

from tests.pad.brute import CONFIGS, axes, text_of, vocabulary
from tests.pad.brute_heads import Heads, geometries
from tests.pad.gqa import llama
from tp3.pad.planner import Plan, plan

SIZES = range(2, 9)
REFUSED = {"Llama-3_3-Nemotron-Super-49B-v1"}
PLANNED = sorted(set(CONFIGS) - REFUSED)
every = pytest.mark.parametrize("name", PLANNED)


planned = lru_cache(maxsize=None)(lambda name, tp: plan(CONFIGS[name], tp=tp))


def heads(found: Plan) -> list[tuple[str, str]]:
    """The pairs of query and KV axes."""
    return [
        (axis.name.replace("kv_", "q_"), axis.name)
        for axis in found.axes
        if axis.name.startswith("kv_heads")
    ]


@every
def test_every_rank_gets_a_whole_share(name: str) -> None:
    for tp in SIZES:
        found = planned(name, tp)
        shared = {kv for _, kv in heads(found)}
        for axis in found.axes:
            whole = axis.padded % tp == 0 and axis.per_rank * tp == axis.padded
            by_ranks = axis.name in shared and tp % axis.padded == 0 and axis.per_rank == 1
            assert whole or by_ranks, (tp, axis)


@every
def test_every_query_head_reads_its_kv_head(name: str) -> None:
    """Also the value heads of a delta net their key head, Mamba heads their group."""
    for tp in SIZES:
        found = planned(name, tp)
        spreads = found.spreads
        pairs = [*heads(found), ("linear_value_heads", "linear_key_heads")]
        pairs += [("mamba_heads", "mamba_groups"), ("q_heads", "o_groups")]
        for many, few in pairs:
            if few not in spreads:
                continue
            readers, read = spreads[many], spreads[few]
            assert readers.padded % read.padded == 0
            ratio, trained = readers.padded // read.padded, readers.stock // read.stock
            sources = readers.sources
            assert sorted(s for s in sources if s is not None) == list(range(readers.stock))
            for number, source in enumerate(sources):
                kept = read.sources[number // ratio]
                assert source is None or kept == source // trained, (tp, many, number)


@every
def test_no_smaller_heads_serve(name: str) -> None:
    """Of all counts that keep the map, that an engine and the format take, and that cache in no
    layer more than whole groups appended, none costs a rank less. Padded, but not copied KV heads
    (8 for 7) are among them.
    """
    for tp in SIZES:
        found = planned(name, tp)
        pairs = heads(found)
        if not pairs:
            continue
        shapes = geometries(name)
        whole = [shape.append(tp) for shape, _ in shapes]
        while len({q for q, _ in whole}) > 1:  # geometries that share a count of query heads
            most = max(q for q, _ in whole)
            whole = [shape.append(tp, most) for shape, _ in shapes]
        cached = [max(kv // tp, 1) for _, kv in whole]
        costs = []
        for q in range(shapes[0][0].q, whole[0][0] + 1):
            each = [
                shape.cheapest(q, tp, most) for (shape, _), most in zip(shapes, cached, strict=True)
            ]
            if None not in each:
                costs.append(sum(cost * layers for cost, (_, layers) in zip(each, shapes)))
        got = 0
        sizes = found.padded_sizes
        for (q_axis, kv_axis), (shape, layers), most in zip(pairs, shapes, cached, strict=True):
            q, kv = sizes[q_axis], sizes[kv_axis]
            assert shape.fits(q, kv, tp)
            assert max(kv // tp, 1) <= most
            got += shape.cost(q, kv, tp) * layers
        assert got == min(costs), (tp, found.strategy, sizes)


@pytest.mark.parametrize("tp", SIZES)
@pytest.mark.parametrize(
    ("head_dim", "block"), [(128, (1, 1)), (128, (128, 128)), (64, (128, 128)), (64, (64, 128))]
)
def test_no_smaller_heads_serve_any_counts(head_dim: int, block: tuple[int, int], tp: int) -> None:
    """The same for every small count of heads, also where two share a block."""
    stored = {"quantization_config": {"quant_method": "fp8", "weight_block_size": list(block)}}
    more = stored if block != (1, 1) else {}
    for kv, ratio in product(range(2, 7), range(1, 10)):
        shape = Heads(kv * ratio, kv, head_dim, head_dim, 2, block, block)
        whole = shape.append(tp)
        costs = [
            shape.cheapest(q, tp, max(whole[1] // tp, 1)) for q in range(kv * ratio, whole[0] + 1)
        ]
        config = llama(kv * ratio, kv, head_dim, 128 * tp, 64 * tp, **more)
        sizes = plan(config, tp=tp).padded_sizes
        got = shape.cost(sizes["q_heads"], sizes["kv_heads"], tp)
        assert got == min(cost for cost in costs if cost is not None), (kv * ratio, kv, sizes)


@every
def test_no_smaller_width_or_unit_serves(name: str) -> None:
    for tp in SIZES:
        sizes = dict(planned(name, tp).padded_sizes)
        least = {"vocab": vocabulary(text_of(CONFIGS[name])["vocab_size"], tp)}
        for axis in axes(name):
            least |= axis.smallest(tp)
        for pair in heads(planned(name, tp)):
            sizes.pop(pair[0]), sizes.pop(pair[1])
        assert {axis: least[axis] for axis in sizes} == sizes, tp


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_no_padding_serves_is_refused(name: str) -> None:
    """Every layer has a width of its own that engines derive: no size in the config would do."""
    for tp in SIZES:
        with pytest.raises(ValueError, match="ffn_mult"):
            plan(CONFIGS[name], tp=tp)
