"""Memory ordering between processes for plain loads and stores.

x86 keeps the order of stores and of loads, so a flag stored after its payload is seen after it.
Other processors need fences; libatomic's ``atomic_thread_fence`` gives them (written for Arm, never
run on one).
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable

_SEQ_CST = 5
_STORE_ORDERED = ("x86_64", "AMD64", "i686")


def _no_fence() -> None:
    """Nothing to do: the processor keeps the order."""


def _libatomic_fence() -> Callable[[], None]:
    try:
        fence = ctypes.CDLL("libatomic.so.1").atomic_thread_fence
    except OSError as error:
        raise RuntimeError(
            f"r4d needs libatomic.so.1 on {platform.machine()} to order memory between ranks "
            f"({error}); install libatomic"
        ) from error
    return lambda: fence(_SEQ_CST)


def make_fence() -> Callable[[], None]:
    """The fence to call before publishing a flag and after having seen one."""
    return _no_fence if platform.machine() in _STORE_ORDERED else _libatomic_fence()
