"""Where a command's PATH leads: a checkpoint folder, a `config.json`, or a model of the hub."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def read_source(path: str) -> dict[str, Any]:
    """The config at ``path``; for a hub id that is no file here, the hub's."""
    from tp3.pad import read_config

    if Path(path).exists() or not _HUB_ID.fullmatch(path):
        return read_config(path)
    return read_config(_from_hub(path))


def _from_hub(name: str) -> str:
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    except ImportError as error:
        raise ValueError(
            f"{name} does not exist; for models of the hub: pip install 'tp3[hub]'"
        ) from error
    try:
        return str(hf_hub_download(name, "config.json"))
    except (OSError, HfHubHTTPError, HFValidationError) as error:
        first = next(iter(str(error).splitlines()), "no answer")
        raise ValueError(f"{name} does not exist, nor does the hub give it: {first}") from error
