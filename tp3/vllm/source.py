"""The config of a checkpoint as it lies beside the weights, wherever vLLM reads them from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tp3.pad import read_config
from tp3.pad.configs import CONFIG, MODELOPT


def raw_config(model_config: Any) -> dict[str, Any]:
    """``config.json`` with vLLM's overrides; what vLLM holds, where there is no such file."""
    raw = _file(model_config)
    if raw is None:
        raw = model_config.hf_config.to_dict()
    overrides = model_config.hf_overrides
    return merged(raw, overrides) if isinstance(overrides, Mapping) else raw


def _file(model_config: Any) -> dict[str, Any] | None:
    folder = Path(model_config.model)
    if (folder / CONFIG).exists():
        return read_config(folder)
    from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

    revision = model_config.revision
    raw: dict[str, Any] | None = get_hf_file_to_dict(CONFIG, model_config.model, revision)
    if raw is not None and not raw.get("quantization_config"):
        beside = get_hf_file_to_dict(MODELOPT, model_config.model, revision)
        if beside:
            content = beside.get("quantization", beside)
            raw["quantization_config"] = {"quant_method": "modelopt", **content}
    return raw


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with what ``over`` says, folder by folder."""
    out = dict(base)
    for name, value in over.items():
        old = out.get(name)
        both = isinstance(value, Mapping) and isinstance(old, Mapping)
        out[name] = merged(old, value) if both else value  # type: ignore[arg-type]
    return out
