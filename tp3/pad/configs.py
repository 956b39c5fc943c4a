"""What lies beside the weights of a checkpoint: its config. No torch."""

from __future__ import annotations

import json
from os import PathLike
from pathlib import Path
from typing import Any

CONFIG = "config.json"
MODELOPT = "hf_quant_config.json"


def read_config(path: str | PathLike[str]) -> dict[str, Any]:
    """The config of a checkpoint folder, or of a ``config.json`` named directly.

    ModelOpt may write its quantisation into a file of its own beside the config; it is put in under
    ``quantization_config``, as newer versions do themselves. Errors: ValueError in one sentence.
    """
    file = Path(path)
    if not file.exists():
        raise ValueError(f"{path} does not exist")
    if file.is_dir():
        file = file / CONFIG
        if not file.exists():
            raise ValueError(f"{path} has no {CONFIG}")
    config = _object(file)
    beside = file.with_name(MODELOPT)
    if file.name == CONFIG and not config.get("quantization_config") and beside.exists():
        content = _object(beside)
        config["quantization_config"] = {
            "quant_method": "modelopt",
            **content.get("quantization", content),
        }
    return config


def _object(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} must hold a JSON object, got {type(content).__name__}")
    return content
