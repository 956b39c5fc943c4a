"""Keeping Dynamo out of the backend.

C++ calls a group in the middle of compiled code: DDP's reducer, a functional collective. Dynamo
evaluates every Python frame there, so it would compile the backend's own code too, wherever it gets
through its locks and threads; a process of DDP under ``torch.compile`` died of that (torch 2.11,
test_ddp_compile_static_graph of PyTorch's suite). ``torch.compiler.disable`` would do, but imports
the compiler, seconds of it, for everybody; this marks the code objects that C++ enters by.
"""

from __future__ import annotations

from types import FunctionType
from typing import TypeVar

import torch

C = TypeVar("C", bound=type)


def untraced(cls: C) -> C:
    """Methods of ``cls``, and what they call, run as they are under ``torch.compile``."""
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    strategy = frames._FrameExecStrategy(skip, skip)  # the frame itself, and those below it
    for method in vars(cls).values():
        if isinstance(method, FunctionType):
            frames.set_code_exec_strategy(method.__code__, strategy)
    return cls
