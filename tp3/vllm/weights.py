"""The weights hook: the loader's stream, padded tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from tp3.pad import Plan
from tp3.pad.check import check
from tp3.pad.headers import read_headers
from tp3.vllm import draft, norms
from tp3.vllm.anchors import Anchor, Hook, wrap
from tp3.vllm.log import logger
from tp3.vllm.plans import mark_of, planned_for
from tp3.vllm.settings import Settings

STREAM = Anchor(
    "vllm.model_executor.model_loader.default_loader:DefaultModelLoader.get_all_weights",
    ("self", "model_config", "model"),
)
# Those that read a checkpoint through DefaultModelLoader, and the one that reads none.
FORMATS = (
    "auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "pt", "npcache", "mistral",
    "dummy",
)  # fmt: skip


def check_format(load_format: Any) -> None:
    """Errors: ValueError for a loader that the stream does not pass through."""
    name = str(getattr(load_format, "value", load_format))
    if name not in FORMATS:
        raise ValueError(
            f"tp3: a padded model cannot be loaded with --load-format {name}; allowed: "
            f"{', '.join(FORMATS)}; `tp3 pad` writes a padded checkpoint for the others"
        )


def check_headers(model: str, planned: Plan, *, strict: bool) -> None:
    """Compare a local checkpoint with the plan before any process starts. Errors: ValueError names
    a tensor; a warning where not strict.
    """
    if not any(Path(model).glob("*.safetensors")):
        return
    try:
        check(read_headers(model), planned).require()
    except ValueError as error:
        if strict:
            raise ValueError(
                f"tp3: {model} cannot be padded: {error}. TP3_STRICT=0 makes this a warning"
            ) from error
        logger.warning("tp3: %s", error)


def install(settings: Settings) -> None:
    """Wrap the stream of every model that ``config`` has widened."""

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        def get_all_weights(self: Any, model_config: Any, model: Any) -> Any:
            planned = planned_for(model_config)
            if planned is None:
                return original(self, model_config, model)
            norms.apply(model, (mark_of(model_config) or {}).get("norm_eps_factors", {}))
            self.local_expert_ids = None  # the plan counts every expert
            stream = original(self, model_config, model)
            whole = not draft.skips_files(model)
            return padded(stream, planned, strict=settings.strict, whole=whole)

        return get_all_weights

    wrap(STREAM, around)


def padded(stream: Iterable[Any], planned: Plan, *, strict: bool, whole: bool) -> Iterator[Any]:
    """The padded stream, and its tally in the log. whole: all of the checkpoint comes; a draft
    model inside of one may skip files.
    """
    from tp3.pad.weights import Tally, padded_weights

    tally = Tally()
    yield from padded_weights(stream, planned, strict=strict, tally=tally, whole=whole)
    logger.info(
        "tp3: %d tensors came, %s; padded:\n%s",
        len(tally.names),
        "every one that the plan asks for" if whole else "as many as the draft needs",
        "\n".join(tally.lines()) or "none",
    )


HOOK = Hook("weights", "the loader's stream, padded", (STREAM,), install)
