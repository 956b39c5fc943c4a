"""The vision hook: a tower whose heads do not divide runs data-parallel, whole on each rank."""

from __future__ import annotations

from typing import Any

from tp3.vllm.anchors import Anchor, Hook
from tp3.vllm.log import logger
from tp3.vllm.settings import Settings

MODE = Anchor("vllm.config.multimodal:MultiModalConfig.mm_encoder_tp_mode")
HEADS = ("num_heads", "num_attention_heads")


def switch(model_config: Any, tp: int) -> None:
    """Ask vLLM for ``--mm-encoder-tp-mode data`` where the tower's heads do not divide.

    Errors: ValueError for a model whose tower vLLM can only cut.
    """
    mode = getattr(model_config, "multimodal_config", None)
    tower = getattr(model_config.hf_config, "vision_config", None)
    heads = next((n for name in HEADS if (n := getattr(tower, name, None))), None)
    if mode is None or heads is None or heads % tp == 0 or mode.mm_encoder_tp_mode == "data":
        return
    if mode.language_model_only:
        return
    if not model_config._model_info.supports_multimodal_encoder_tp_data:
        raise ValueError(
            f"tp3: the vision tower of {model_config.model} has {heads} heads, which {tp} ranks do "
            "not divide, and vLLM cannot run it data-parallel; --language-model-only leaves it out"
        )
    mode.mm_encoder_tp_mode = "data"
    logger.info("tp3: the vision tower (%d heads) runs data-parallel, whole on each rank", heads)


def install(settings: Settings) -> None:
    """Nothing of its own: ``config`` calls ``switch``."""


HOOK = Hook("vision", "towers that do not divide run data-parallel", (MODE,), install)
