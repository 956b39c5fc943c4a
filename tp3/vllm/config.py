"""The config hook: sizes are widened in vLLM's model config before anything looks at them.

The Transformers config object that vLLM holds is changed in place: made anew, Transformers would
check it and refuse some (a hidden size that does not divide by the padded heads); attributes of an
object that is there are only checked one by one, and pickling to the workers checks nothing
(Transformers 5.19). What the workers need to plan again goes with it, under ``tp3``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tp3.pad import Plan
from tp3.pad.model import HeadAxes
from tp3.pad.report import TITLES, lines, rows
from tp3.vllm import backend, cache_keys, kernels, ranks_per_gpu, vision, weights
from tp3.vllm.anchors import Anchor, Hook, wrap
from tp3.vllm.head_dim import head_count
from tp3.vllm.log import logger, table
from tp3.vllm.plans import KEY, engine_plan, mark_of
from tp3.vllm.settings import Settings
from tp3.vllm.source import raw_config

FIRST = Anchor("vllm.config.vllm:VllmConfig.try_verify_and_update_config", ("self",))
VERIFY = Anchor(
    "vllm.config.model:ModelConfig.verify_with_parallel_config", ("self", "parallel_config")
)
ARCH = Anchor("vllm.config.model:ModelConfig.get_model_arch_config", ("self",))


def install(settings: Settings) -> None:
    """Widen targets when the whole config is made, and drafts when theirs is checked."""

    def first(original: Callable[..., Any]) -> Callable[..., Any]:
        def try_verify_and_update_config(self: Any) -> Any:
            if self.model_config is not None:
                if settings.pad:
                    tp = self.parallel_config.tensor_parallel_size
                    pad(self.model_config, tp, settings)
                prepare(self, settings)
            return original(self)

        return try_verify_and_update_config

    def verify(original: Callable[..., Any]) -> Callable[..., Any]:
        def verify_with_parallel_config(self: Any, parallel_config: Any) -> Any:
            if settings.pad:
                pad(self, parallel_config.tensor_parallel_size, settings)
            return original(self, parallel_config)

        return verify_with_parallel_config

    wrap(FIRST, first)
    wrap(VERIFY, verify)


def prepare(vllm_config: Any, settings: Settings) -> None:
    """What else a padded model, or r4d, asks of the whole config. Errors: ValueError."""
    if mark_of(vllm_config.model_config) is not None:
        weights.check_format(vllm_config.load_config.load_format)
        if vllm_config.lora_config is not None:
            raise ValueError(
                f"tp3: {vllm_config.model_config.model} is padded, and LoRA adapters have the "
                "sizes that it was trained with; merge the adapter, or use a number of ranks that "
                "needs no padding"
            )
    backend.prepare(vllm_config, settings)
    ranks_per_gpu.prepare(vllm_config, settings)


def pad(model_config: Any, tp: int, settings: Settings) -> None:
    """Widen a model for ``tp`` ranks, once. Errors: ValueError, a paragraph that names what would
    work.
    """
    mark = mark_of(model_config)
    if mark is not None or tp == 1:
        if mark is not None and mark["tp"] != tp:
            raise ValueError(
                f"tp3: {model_config.model} is padded for {mark['tp']} ranks already and was asked "
                f"for {tp}"
            )
        return
    vision.switch(model_config, tp)
    raw = raw_config(model_config)
    lifted = kernels.lifted(model_config, settings)
    try:
        planned = engine_plan(raw, tp, lifted)
    except ValueError as error:
        _leave_or_refuse(model_config, tp, error)
        return
    if planned.inert:
        return
    weights.check_headers(model_config.model, planned, strict=settings.strict)
    before = cache_keys.key(model_config)
    widen(model_config, planned, raw, lifted)
    cache_keys.check(before, model_config)
    logger.info(
        "tp3: %s (%s) is padded for %d ranks, heads by %s\n%s\n%s",
        model_config.model,
        planned.model.model_type,
        tp,
        planned.strategy,
        table(TITLES, rows(planned)),
        "\n".join(lines(planned)),
    )


def widen(
    model_config: Any, planned: Plan, raw: Mapping[str, Any], lifted: Sequence[str] = ()
) -> None:
    """Write the planned sizes into the config objects. lifted: what the plan was made with. Errors:
    ValueError where they hold others than the checkpoint's.
    """
    padded = planned.padded_config(raw)
    mark = {**padded.pop(KEY), "config": dict(raw), "lifted": list(lifted)}
    roots = model_config.hf_config, model_config.hf_text_config
    heads = {
        path: axis
        for axis in planned.model.axes
        if isinstance(axis, HeadAxes)
        for path in planned.model.paths.get(axis.names[0], ())
    }
    for path, stock, value in changes(raw, padded):
        if path in heads:
            hidden = planned.model.sizes["hidden"]
            value = head_count(value, hidden=hidden, head_dim=heads[path].head_dim)
        _put(roots, path, stock, value)
    for root in roots:
        setattr(root, KEY, mark)
    model_config.model_arch_config = model_config.get_model_arch_config()


def changes(
    raw: Mapping[str, Any], padded: Mapping[str, Any], at: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """The places that differ: dotted path, what stood there (None: nothing), what does now."""
    for name, value in padded.items():
        old = raw.get(name)
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            yield from changes(old, value, f"{at}{name}.")
        elif name not in raw or old != value:
            yield f"{at}{name}", old, value


def _put(roots: tuple[Any, Any], path: str, stock: Any, value: Any) -> None:
    """Set a path below the whole config, or below the text config where that is what there is."""
    *folders, last = path.split(".")
    whole, text = roots
    place = whole
    for folder in folders:
        place = _get(place, folder)
        if place is None:
            place = text
            break
    places = [place]
    if text is not place and hasattr(text, last) and (not folders or "text" in folders[0]):
        places.append(text)
    for each in places:
        found = _get(each, last)
        if stock is not None and found is not None and found not in (stock, value):
            raise ValueError(
                f"tp3: the checkpoint's config says {path} = {stock!r} and vLLM's {found!r}; an "
                "override of a padded size cannot be followed"
            )
        if isinstance(each, dict):
            each[last] = value
        else:
            setattr(each, last, value)


def _get(place: Any, name: str) -> Any:
    return place.get(name) if isinstance(place, dict) else getattr(place, name, None)


def _leave_or_refuse(model_config: Any, tp: int, error: ValueError) -> None:
    """A model that tp3 cannot plan but whose heads divide is vLLM's; any other is refused."""
    arch = model_config.model_arch_config
    q, kv = arch.total_num_attention_heads, arch.total_num_kv_heads

    def fits(size: int) -> bool:
        return bool(q % size == 0 and (not kv or kv % size == 0 or size % kv == 0))

    if fits(tp):
        logger.warning("tp3: %s goes to vLLM unpadded: %s", model_config.model, error)
        return
    sizes = ", ".join(str(size) for size in range(1, 17) if fits(size))
    raise ValueError(
        f"tp3: {model_config.model} cannot run on {tp} tensor-parallel ranks. It has {q} attention "
        f"heads and {kv} KV heads, which do not divide, and it cannot be padded: {error}. "
        f"--tensor-parallel-size {sizes} would divide its heads."
    )


HOOK = Hook("config", "sizes widened before validation", (FIRST, VERIFY, ARCH), install,
            wanted=lambda settings: True)  # fmt: skip
