"""The plan that vLLM is to run, and where it is kept: in the config, which goes to every process.

vLLM pads the vocabulary itself, with zeros, and masks the tail: it is asked for another multiple
(``vocabulary``), and the plan leaves that axis alone.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from tp3.pad import Plan, plan
from tp3.pad.corrections import eps_factors
from tp3.pad.model import Vocabulary
from tp3.pad.spread import kept

KEY = "tp3"
# Those whose two corrected norms vLLM gives one epsilon: only equal factors serve.
ONE_EPSILON = ("minimax_m2",)
ENGINE_ROUNDS = "the engine rounds it up itself"
# What vLLM's own kernels take of a rank's N and K without copying a weight into a larger one:
# CUTLASS for FP8, Marlin for MXFP4. Lifted where ``kernels`` offers ours. Sources: vLLM 0.26 and
# 0.32, CutlassFP8ScaledMMLinearKernel, marlin_padded_nk,
# mxfp4_round_up_hidden_size_and_intermediate_size.
ALIGNMENT = {"fp8": (16, 16), "mxfp4": (64, 128)}


def engine_plan(config: Mapping[str, Any], tp: int, lifted: Collection[str] = ()) -> Plan:
    """The plan of a checkpoint's config as vLLM needs it. lifted: formats of ``ALIGNMENT`` whose
    layers run on kernels that ask no more than the format. Errors: ValueError in one sentence.
    """
    alignment = {name: each for name, each in ALIGNMENT.items() if name not in lifted}
    planned = plan(config, tp=tp, alignment=alignment)
    if planned.model.model_type in ONE_EPSILON and not _even(planned):
        planned = plan(config, tp=tp, strategy="append", alignment=alignment)
    names = {axis.name for axis in planned.model.axes if isinstance(axis, Vocabulary)}
    return replace(
        planned,
        axes=tuple(
            replace(axis, padded=axis.stock, per_rank=-(-axis.stock // tp), reason=ENGINE_ROUNDS)
            if axis.name in names
            else axis
            for axis in planned.axes
        ),
        spreads={
            name: kept(spread.stock) if name in names else spread
            for name, spread in planned.spreads.items()
        },
    )


def _even(planned: Plan) -> bool:
    """Whether all corrected norms have one factor."""
    factors = eps_factors(planned.model, planned.spreads)
    norms = {rule.pattern for rule in planned.model.rules if rule.correction}
    return not factors or (len(factors) == len(norms) and len(set(factors.values())) == 1)


def mark_of(model_config: Any) -> dict[str, Any] | None:
    """What ``config`` left in a padded model's config; None for a stock model."""
    for name in ("hf_config", "hf_text_config"):
        mark = getattr(getattr(model_config, name, None), KEY, None)
        if isinstance(mark, dict) and "config" in mark:
            return mark
    return None


def planned_for(model_config: Any) -> Plan | None:
    """The plan of a padded model; None for a stock one."""
    mark = mark_of(model_config)
    if mark is None:
        return None
    return _again(json.dumps(mark["config"]), mark["tp"], tuple(mark.get("lifted", ())))


@lru_cache(maxsize=8)
def _again(config: str, tp: int, lifted: tuple[str, ...]) -> Plan:
    return engine_plan(json.loads(config), tp, lifted)
