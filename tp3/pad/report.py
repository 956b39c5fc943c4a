"""A plan as rows of text and as a record for JSON. No torch."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from tp3.pad.planner import Axis, Plan

TITLES = ("axis", "trained", "padded", "per rank", "")


def rows(planned: Plan) -> list[tuple[str, ...]]:
    """A row per axis, under ``TITLES``."""
    return [
        (axis.name, f"{axis.stock}", f"{axis.padded}", _share(axis, planned.tp), axis.reason)
        for axis in planned.axes
    ]


def lines(planned: Plan) -> list[str]:
    """What stands below the rows: bytes on a rank, ways that were rejected, notes."""
    ledger = planned.ledger
    return [
        f"per rank: {_size(ledger.weight_bytes)} of weights "
        f"({ledger.overhead:+.1%} against an even share of the trained ones), "
        f"{ledger.kv_bytes_per_token} bytes of cache per token",
        *(f"rejected: {text}" for text in planned.rejected),
        *planned.notes,
    ]


def record(planned: Plan) -> dict[str, Any]:
    """The plan as JSON knows it; bytes are those of one rank."""
    ledger = planned.ledger
    made: dict[str, Any] = {
        "model_type": planned.model.model_type,
        "tp": planned.tp,
        "strategy": planned.strategy,
        "format": planned.format.name,
        "axes": [asdict(axis) for axis in planned.axes],
        "per_rank": {
            "weight_bytes": ledger.weight_bytes,
            "kv_bytes_per_token": ledger.kv_bytes_per_token,
        },
        "overhead": ledger.overhead,
        "rejected": list(planned.rejected),
        "notes": list(planned.notes),
    }
    if planned.also_tp:
        made["also_tp"] = list(planned.also_tp)
    return made


def _share(axis: Axis, tp: int) -> str:
    return f"{axis.per_rank}" if axis.padded >= tp else f"{axis.per_rank} (shared)"


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:,.2f} GiB"
