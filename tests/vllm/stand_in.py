"""tp3's kernels where there is no GPU: their operators are the references, rounded to bf16."""

from __future__ import annotations

import torch

from tp3.kernels import ops, reference

calls: dict[str, int] = {}


def operators() -> torch.library.Library:
    """Define ``torch.ops.tp3``; the plugin then finds it made."""
    assert not ops._registered
    library = torch.library.Library(ops.NAMESPACE, "FRAGMENT")
    ops._registered.append(library)
    for schema in ops.OPERATORS:
        name = library.define(schema)
        library.impl(name, _counted(name), "CPU")
    return library


def _counted(name):
    exact = getattr(reference, name)

    def operator(*args):
        calls[name] = calls.get(name, 0) + 1
        return exact(*args).to(torch.bfloat16)

    return operator


def gpu() -> None:
    """Let the plugin take this process's CPU for a device that runs the kernels, and vLLM round
    MXFP4 experts up as it does for Marlin.
    """
    from vllm.model_executor.layers.quantization import mxfp4

    from tp3.vllm import kernels

    operators()
    kernels.device_serves = lambda: True
    rounded = mxfp4.mxfp4_round_up_hidden_size_and_intermediate_size
    mxfp4.mxfp4_round_up_hidden_size_and_intermediate_size = lambda backend, *sizes: rounded(
        mxfp4.Mxfp4MoeBackend.MARLIN, *sizes
    )
