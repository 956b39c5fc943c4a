"""Collectives in profiles: ``r4d:all_reduce``, as torch names those of NCCL and Gloo."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch._C._autograd import _profiler_enabled
from torch.profiler import record_function

from tp3.comm.work import Work

enabled: Callable[[], bool] = _profiler_enabled


def recorded(name: str, call: Callable[[], Work], *, sync: bool) -> Work:
    """``call`` as an event; of an asynchronous one the event lasts until the work has ended."""
    capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    with record_function(f"r4d:{name}") as record:
        work = call()
        if not sync and not capturing:
            ended: torch.futures.Future[Any] = torch.futures.Future()
            record._call_end_callbacks_on_future(ended)
            threading.Thread(target=_end, args=(work, ended), daemon=True).start()
    return work


def _end(work: Work, ended: torch.futures.Future[Any]) -> None:
    with suppress(RuntimeError):  # the caller's wait() says what went wrong
        work.settle()
    ended.set_result(None)
