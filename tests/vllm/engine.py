"""One rank that runs models through vLLM in turn; rank 0 writes down what they said."""

from __future__ import annotations

import functools
import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

COMMON = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 256,
    "kv_cache_memory_bytes": 64 << 20,
    "enable_prefix_caching": False,
    "skip_tokenizer_init": True,
    # vLLM's rotary kernel for CPUs is wrong on tensors of three dimensions
    "compilation_config": {"custom_ops": ["all", "-rotary_embedding"]},
}


LOOK = "register_triton_kernel_overrides"
hold = gc.freeze


def hasten() -> None:
    """Spare this process, forked from one that imported vLLM, what costs more than its models.

    vLLM collects garbage eight times a model, each time through all modules, since it thaws what
    was frozen; asks a process that imports vLLM anew about each architecture, to keep CUDA out of
    its own; and looks through all modules for Triton's kernels each time that a worker starts.
    """
    from vllm.model_executor.models import registry
    from vllm.platforms.cpu import CpuPlatform

    gc.freeze = gc.unfreeze = lambda: None
    registry._run_in_subprocess = lambda inspect: inspect()
    if hasattr(CpuPlatform, LOOK):  # not before 0.32
        setattr(CpuPlatform, LOOK, staticmethod(functools.cache(getattr(CpuPlatform, LOOK))))


def be(rank: int, job: dict[str, Any], folder: Path) -> None:
    """One rank of ``job``: models by name, each with the arguments of ``LLM`` and a port, the
    prompts, how many tokens to say, and the number of ranks. Rank 0 writes FOLDER/out.json.
    """
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": job["tp"], "MASTER_ADDR": "127.0.0.1"}
    if job["tp"] > 1:
        os.environ.update({name: str(value) for name, value in place.items()})
    if "TP3_TEST_SPOIL" in os.environ:
        spoil()
    if "TP3_TEST_KERNELS" in os.environ:
        from tests.vllm import stand_in

        stand_in.gpu()
    said: dict[str, Any] = {}
    for (name, arguments), port in zip(job["models"].items(), job["ports"], strict=True):
        # a group is made anew for each; on the last one's port it might meet the last store
        os.environ["MASTER_PORT"] = str(port)
        said[name] = run(job, arguments)
        if rank == 0:
            (folder / "out.json").write_text(json.dumps(said))


def run(job: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Greedy tokens with their log-probabilities, those of the prompts, and r4d's counts."""
    from vllm import LLM, SamplingParams

    options = {**COMMON, "tensor_parallel_size": job["tp"], **arguments}
    alone = "distributed_executor_backend" in options  # vLLM starts its workers itself
    if job["tp"] > 1:
        options["distributed_executor_backend"] = "external_launcher"
    llm = LLM(**options)
    params = SamplingParams(
        temperature=0.0,
        max_tokens=job["tokens"],
        logprobs=1,
        prompt_logprobs=1,
        ignore_eos=True,
        detokenize=False,
    )
    prompts: list[dict[str, Any]] = [{"prompt_token_ids": each} for each in job["prompts"]]
    for seed, prompt in enumerate(prompts if job["pictures"] else ()):
        prompt["multi_modal_data"] = {"image": picture(seed)}
    answers = []
    for answer in llm.generate(prompts, params, use_tqdm=False):
        (out,) = answer.outputs
        tokens = list(out.token_ids)
        answers.append(
            {
                "tokens": tokens,
                "logprobs": [step[t].logprob for step, t in zip(out.logprobs, tokens, strict=True)],
                "prompt_logprobs": [
                    step[t].logprob
                    for step, t in zip(answer.prompt_logprobs[1:], answer.prompt_token_ids[1:])
                ],
            }
        )
    found = {"answers": answers, "mark": mark(llm), "drafted": drafted(llm)}
    if not alone:
        found |= {"stats": stats(), "hooks": hooked(), "kernels": kernel_calls()}
    del llm
    clear()
    return found


def picture(seed: int) -> Any:
    """Noise, of its own width."""
    from numpy.random import default_rng
    from PIL import Image

    return Image.fromarray(default_rng(seed).integers(0, 256, (64, 64 + 32 * seed, 3), "uint8"))


def stats() -> dict[str, int]:
    """What r4d carried for the tensor-parallel group; empty where it is not there."""
    from vllm.distributed import get_tp_group

    group = getattr(get_tp_group().device_group, "group", None)
    return {} if group is None else dict(group.stats())


def kernel_calls() -> dict[str, int]:
    """How often tp3's kernels ran, where they have stand-ins."""
    module = sys.modules.get("tests.vllm.stand_in")
    return {} if module is None else dict(module.calls)


def mark(llm: Any) -> dict[str, Any] | None:
    """What the plugin left in the config."""
    found = getattr(llm.llm_engine.vllm_config.model_config.hf_config, "tp3", None)
    return {k: v for k, v in found.items() if k != "config"} if found else None


def hooked() -> dict[str, Any]:
    """What the plugin chose for this process."""
    from vllm.distributed import get_tp_group
    from vllm.platforms import current_platform

    communicator = get_tp_group().device_communicator
    return {
        "backend": type(current_platform).dist_backend,
        "communicator": None if communicator is None else type(communicator).__name__,
    }


def drafted(llm: Any) -> dict[str, int]:
    """How many tokens a draft proposed and how many the target took."""
    if llm.llm_engine.vllm_config.speculative_config is None:
        return {}
    return {
        metric.name: metric.value
        for metric in llm.get_metrics()
        if metric.name.startswith("vllm:spec_decode_num_") and hasattr(metric, "value")
    }


def spoil() -> None:
    """Pad with other numbers than zeros."""
    from tp3.pad import weights

    right = weights.pad_tensor

    def wrong(entry: Any, tensor: Any, *more: Any) -> Any:
        padded = right(entry, tensor, *more)
        return padded if padded is tensor else padded.masked_fill(padded == 0, 0.05)

    weights.pad_tensor = wrong


def clear() -> None:
    from vllm.distributed import destroy_model_parallel

    destroy_model_parallel()
    gc.collect()
    hold()  # what is left are modules
