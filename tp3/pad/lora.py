"""A LoRA adapter, padded like the model that it adapts.

It adds B A to a weight [N, K]: A [r, K] follows the weight's columns, B [N, r] its rows, so that a
copied head is changed like the one it copies, and a dummy not at all. Names are PEFT's, such as
``base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight``; an embedding's factors lie the
other way, A [r, tokens]. Tensors saved whole (``modules_to_save``) are padded as the model's own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from torch import Tensor

from tp3.pad.catalogue import Catalogue, Entry
from tp3.pad.planner import Plan
from tp3.pad.spread import kept
from tp3.pad.weights import pad_tensor, spelled

PREFIX = "base_model.model."
# Which dimension of the weight each dimension of a factor is; None: the rank of the adapter.
FACTORS = {
    "lora_A": (None, 1),
    "lora_B": (0, None),
    "lora_embedding_A": (None, 0),
    "lora_embedding_B": (1, None),
}
PARTNERS = {name: name[:-1] + ("B" if name[-1] == "A" else "A") for name in FACTORS}
NAME = re.compile(
    rf"(?P<module>.+)\.(?P<factor>{'|'.join(FACTORS)})(?P<rest>(\.(?!weight$)[^.]+)?(\.weight)?)"
)


def padded_adapter(
    weights: Iterable[tuple[str, Tensor]], plan: Plan
) -> Iterator[tuple[str, Tensor]]:
    """The same stream, padded as `plan` says. Errors: ValueError names a tensor that adapts no
    weight of the model or has another shape, and at the end a factor whose partner never came.
    """
    catalogue = Catalogue(plan)
    names: set[str] = set()
    for name, tensor in weights:
        names.add(name)
        yield name, pad_tensor(_entry(catalogue, name, tensor), tensor)
    for name in sorted(names):
        found = NAME.fullmatch(name)
        if found:
            module, factor, rest = found["module"], found["factor"], found["rest"]
            partner = f"{module}.{PARTNERS[factor]}{rest}"
            if partner not in names:
                raise ValueError(f"tensor {partner} is missing, the partner of {name}")


def _entry(catalogue: Catalogue, name: str, tensor: Tensor) -> Entry:
    shape, base = tuple(tensor.shape), name.removeprefix(PREFIX)
    if "lora_magnitude_vector" in base:
        raise ValueError(
            f"tensor {name}: DoRA divides each row by its length, which is 0 for a dummy head"
        )
    found = NAME.fullmatch(base)
    if found is None:
        return catalogue.entry(base, shape, spelled(tensor.dtype))
    rule, logical = catalogue.weight(f"{found['module']}.weight")
    dims = FACTORS[found["factor"]]
    expected = [-1 if dim is None else logical[dim].stock for dim in dims]
    if (
        len(logical) != 2
        or len(shape) != 2
        or any(size not in (-1, got) for size, got in zip(expected, shape))
    ):
        text = ", ".join("r" if size < 0 else str(size) for size in expected)
        raise ValueError(f"tensor {name} has shape {list(shape)}, expected [{text}]")
    spreads = tuple(kept(size) if dim is None else logical[dim] for dim, size in zip(dims, shape))
    return Entry(name, rule, shape, tuple(spread.padded for spread in spreads), spreads)
