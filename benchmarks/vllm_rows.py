"""The rows of `bench_vllm`: which vLLM is booted, with which arguments and settings."""

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DRAWN = random.Random(0)
PROMPTS = [[1, *(DRAWN.randrange(3, 500) for _ in range(48))] for _ in range(4)]
COMMON = {"max_model_len": 512, "max_num_seqs": 16, "max_num_batched_tokens": 2048,
          "enable_prefix_caching": False, "skip_tokenizer_init": True}  # fmt: skip
# Nothing of FlashInfer's, whose kernels would first be compiled.
ON_GPU = {"attention_backend": "TRITON_ATTN", "gpu_memory_utilization": 0.4,
          "enable_flashinfer_autotune": False}  # fmt: skip
CAPTURED = {"cudagraph_capture_sizes": [1, 8, 16]}
GRAPHS = {"compilation_config": CAPTURED}
# On Hopper vLLM fuses all-reduces with norms (FlashInfer), past all that it would choose otherwise.
UNFUSED = {"compilation_config": {**CAPTURED, "pass_config": {"fuse_allreduce_rms": False}}}
# vLLM's rotary kernel for CPUs is wrong on tensors of three dimensions.
ROTARY = {"compilation_config": {"custom_ops": ["all", "-rotary_embedding"]}}
ON_CPU = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
}
STOCK = {"TP3_BACKEND": "default"}
NO_CUSTOM = {"disable_custom_all_reduce": True, **UNFUSED}
NO_SYMM_MEM = {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0"}
# Who carries the all-reduces of ranks with a GPU each; with three vLLM's custom one does not serve.
WAYS: dict[str, dict[str, Any]] = {
    "r4d": {"env": {"TP3_BACKEND": "r4d"}, "r4d": True},
    "stock": {"env": STOCK},
    "custom": {"env": STOCK, "options": UNFUSED},
    "pynccl": {"env": STOCK | NO_SYMM_MEM, "options": NO_CUSTOM},
}


@dataclass(frozen=True)
class Row:
    """One boot of vLLM. rates: numbers of streams that are timed; a row without any runs eagerly in
    fp32, all others in bf16 with CUDA graphs. r4d: it must have carried. compared: the row of the
    same model that this one's answers are held to.
    """

    name: str
    tp: int = 1
    model: str = "small"
    rates: tuple[int, ...] = ()
    r4d: bool = False
    mps: bool = False
    gpus: int = 1
    compared: str = "stock-fp32"
    env: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def alone(self) -> bool:
        """Whether nothing else may run at the same time."""
        return self.mps or bool(self.rates)


def rows(tiny: bool) -> Iterator[Row]:
    """In the order in which they run."""
    model = "tiny" if tiny else "small"
    yield Row("stock-fp32", model=model)
    yield Row("tp3-fp32", 3, model, r4d=True)
    if tiny:
        return
    yield Row("tp6-fp32", 6, r4d=True)
    for tp in (3, 6):
        yield Row(f"tp{tp}-fp32-mps", tp, r4d=True, mps=True)
    yield Row("stock-bf16", rates=(1, 8))
    for mps in (True, False):
        for tp in (3, 6):
            yield Row(f"tp{tp}-bf16{'-mps' * mps}", tp, rates=(1, 8), r4d=True, mps=mps)
    for name, gpus in (("pair", 2), ("three", 3)):
        for turn in (1, 2):
            for way, more in WAYS.items():
                compared = f"{name}-pynccl-1"
                yield Row(f"{name}-{way}-{turn}", gpus, "large", (1, 16), gpus=gpus,
                          compared=compared, **more)  # fmt: skip


def environment(row: Row) -> dict[str, str]:
    """What the row's process finds beside what is there."""
    if row.model == "tiny":
        return ON_CPU
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2").split(",")[: row.gpus]
    return {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "CUDA_VISIBLE_DEVICES": ",".join(seen),
        "TP3_RANKS_PER_GPU": str(row.tp // row.gpus),
        **row.env,
    }


def job_of(row: Row, checkpoint: Path) -> dict[str, Any]:
    """What `vllm_row` is to do."""
    tiny = row.model == "tiny"
    arguments = {
        **COMMON,
        **({} if tiny else ON_GPU),
        **(GRAPHS if row.rates else {"enforce_eager": True, **(ROTARY if tiny else {})}),
        **row.options,
        "model": str(checkpoint),
        "dtype": "bfloat16" if row.rates else "float32",
        "tensor_parallel_size": row.tp,
        "kv_cache_memory_bytes": 64 << 20 if tiny else 1 << 30,
    }
    return {
        "arguments": arguments,
        "prompts": PROMPTS,
        "tokens": 32,
        "rates": row.rates,
        "length": 128,
    }
