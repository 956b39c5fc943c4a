"""MXFP4 and FP8 products at padded local shapes, against what the GPU copies and multiplies.

    python benchmarks/bench_linear.py --write 1xh200          # on a GPU
    TRITON_INTERPRET=1 python benchmarks/bench_linear.py --tiny

First every code and 200 random shapes are judged (error against fp64 at most twice PyTorch's). Then
peers take turns: a turn is a CUDA graph of calls on as many copies of the weights as the cache
cannot hold, a figure the median of the turns in µs per call, launches within the graph included.
"of copy" is bytes of weights and scales per second over the bytes that a copy of 512 MiB reads and
writes per second; "of same copy" over those of a copy that moves as many bytes. Losing rows stay.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import torch
from linear_timing import (
    DEVICE,
    Call,
    ceilings,
    copies_of,
    gate,
    measured,
    operands_of,
    same_copy,
)

from tests.kernels.linear.cases import E4M3, LAUNCHERS, Case
from tp3.bench.machine import hardware, versions
from tp3.kernels.launch import INTERPRETED
from tp3.kernels.operands import KEPT

RESULTS = Path(__file__).parent / "results"
CASES_JUDGED = 200
ROWS = (1, 4, 8, 16, 64, 256, 1024)
# N, K of a rank: down and gate-and-up of 17472 over three ranks, a vocabulary.
MXFP4 = ((5120, 5824), (11648, 5120), (82816, 5120))
FP8 = ((8726, 5120),)
GROUPED = ((4, 1024, 4096),)  # G, N, K
MOE = ((128, 1408, 2880), (128, 2880, 704))  # E, N, K; two choices of each token

Row = dict[str, Any]


def row_of(case: Case, others: Callable[[list[Any]], dict[str, Sequence[Call]]]) -> Row:
    """A case beside its peers."""
    (x,), copies, rest = operands_of(case)
    launcher, (w, scale) = LAUNCHERS[case.kernel], copies[0]
    peers: dict[str, Sequence[Call]] = {
        "tp3": [lambda c=c: launcher(x, *c, *rest) for c in copies],
        "same copy": same_copy(w.nbytes + scale.nbytes),
        **others([x, w, scale, *rest]),
    }
    slots = case.m * (2 if case.kernel == "mxfp4_moe" else 1)
    touched = min(slots, case.many) / case.many if case.kernel == "mxfp4_moe" else 1.0
    groups = case.many if case.kernel == "grouped_fp8_linear" else 1
    return {
        "case": str(case),
        "m": case.m,
        "bytes": int((w.nbytes + scale.nbytes) * touched),
        "flops": 2 * slots * groups * case.n * case.k,
        "us": measured(peers),
    }


def bf16(arguments: list[Any], case: Case) -> dict[str, Sequence[Call]]:
    """A product of bf16 weights of the same shape."""
    x = torch.randn(case.m, case.k, device=DEVICE).bfloat16()
    weights = copies_of([torch.randn(case.n, case.k, device=DEVICE).bfloat16()])
    return {"torch bf16": [lambda w=w: x @ w[0].mT for w in weights]}


def mxfp4(arguments: list[Any], case: Case) -> dict[str, Sequence[Call]]:
    """bf16, and where vLLM is installed its Marlin, which repacks a larger copy of the weights."""
    peers = bf16(arguments, case)
    if INTERPRETED or find_spec("vllm") is None:
        return peers
    from vllm.model_executor.kernels.linear.mxfp4.marlin import MarlinMxFp4LinearKernel as Marlin

    x, *stored = arguments[:3]
    layers = [_layer(case, *copy) for copy in copies_of(stored)]
    try:
        for layer in layers:
            Marlin.process_weights_after_loading(None, layer)
        theirs = Marlin.apply_weights(None, layers[0], x).float()
    except (RuntimeError, AssertionError) as refused:
        print(f"Marlin refuses {case}: {refused}")
        return peers
    ours = LAUNCHERS[case.kernel](x, *stored).float()
    assert (theirs - ours).norm() <= 0.01 * ours.norm(), "Marlin was given other weights"
    calls = [lambda layer=layer: Marlin.apply_weights(None, layer, x) for layer in layers]
    return {"vLLM's Marlin": calls, **peers}


def _layer(case: Case, weight: torch.Tensor, scales: torch.Tensor) -> torch.nn.Module:
    """What vLLM's kernels take for a linear layer."""
    layer = torch.nn.Module()
    layer.weight, layer.weight_scale = (
        torch.nn.Parameter(tensor, requires_grad=False) for tensor in (weight, scales)
    )
    layer.output_size_per_partition, layer.input_size_per_partition = case.n, case.k
    layer.params_dtype = torch.bfloat16
    return layer


def scaled(arguments: list[Any], case: Case) -> dict[str, Sequence[Call]]:
    """_scaled_mm at the next N that it takes, and bf16."""
    if INTERPRETED:
        return bf16(arguments, case)
    x, _, _, x_scale = arguments
    n = -(-case.n // 16) * 16
    weights = copies_of([torch.randn(n, case.k, device=DEVICE).to(E4M3)])
    ones, rows = torch.ones(1, n, device=DEVICE), x_scale[:, None]
    calls = [
        lambda w=w: torch._scaled_mm(x, w[0].mT, rows, ones, out_dtype=torch.bfloat16)
        for w in weights
    ]
    try:
        calls[0]()
    except RuntimeError as refused:
        print(f"_scaled_mm refuses {case}: {refused}")
        return bf16(arguments, case)
    return {f"_scaled_mm N={n}": calls, **bf16(arguments, case)}


def einsum(arguments: list[Any], case: Case) -> dict[str, Sequence[Call]]:
    x = arguments[0]
    weights = copies_of([torch.randn(case.many, case.n, case.k, device=DEVICE).bfloat16()])
    return {
        "torch.einsum bf16": [lambda w=w: torch.einsum("mgk,gnk->mgn", x, w[0]) for w in weights]
    }


def loop(arguments: list[Any], case: Case) -> dict[str, Sequence[Call]]:
    """bf16 products, expert by expert, of experts known beforehand."""
    x, ids = arguments[0], arguments[3]
    weight = torch.randn(case.many, case.n, case.k, device=DEVICE).bfloat16()
    chosen = [(e, torch.nonzero(ids == e)[:, 0]) for e in ids.unique().tolist()]
    return {"torch loop bf16": [lambda: [x[token] @ weight[e].mT for e, token in chosen]]}


def rows_to_measure(tiny: bool) -> Iterator[tuple[Case, Callable[..., Any]]]:
    cut = (lambda n, k: (min(n, 200), min(k, 320))) if tiny else (lambda n, k: (n, k))
    for (n, k), m in product(MXFP4, ROWS[:2] if tiny else ROWS):
        n, k = cut(n, k)
        yield Case("mxfp4_linear", m, n, k), mxfp4
    for (n, k), m in product(FP8, ROWS[:2] if tiny else ROWS):
        n, k = cut(n, k)
        yield Case("fp8_linear", m, n, k, x="token"), scaled
    for (groups, n, k), m in product(GROUPED, ROWS[:2] if tiny else ROWS[:4]):
        n, k = cut(n, k)
        yield Case("grouped_fp8_linear", m, n, k, w="blocks", many=groups), einsum
    for (experts, n, k), m in product(MOE, ROWS[:1] if tiny else (1, 16, 256)):
        n, k = cut(n, k)
        spread = "one token each"
        yield Case("mxfp4_moe", m, n, k, many=8 if tiny else experts, spread=spread), loop


def table(rows: Sequence[Row], limits: dict[str, float]) -> list[str]:
    lines = [
        "| case | µs (quartiles) | TB/s | of copy | of same copy | TFLOP/s | of bf16 | peers, µs |",
        "|---" * 8 + "|",
    ]
    for row in rows:
        low, middle, high = row["us"]["tp3"]
        rate, flops = row["bytes"] / middle * 1e6, row["flops"] / middle * 1e6
        peers = ", ".join(f"{name} {us[1]:.1f}" for name, us in row["us"].items() if name != "tp3")
        lines.append(
            f"| {row['case']} | {middle:.1f} ({low:.1f}–{high:.1f}) | {rate / 1e12:.2f} "
            f"| {rate / limits['copy']:.0%} | {row['us']['same copy'][1] / middle:.0%} "
            f"| {flops / 1e12:.1f} | {flops / limits['bf16']:.0%} | {peers} |"
        )
    return lines


def compiled() -> list[str]:
    """Registers and spills of what has run."""
    lines = ["| kernel | constants | warps | registers | spilled |", "|---" * 5 + "|"]
    for (kernel, constants, warps, _), kept in KEPT.items():
        named = " ".join(f"{name}={value}" for name, value in constants)
        lines.append(
            f"| {kernel.fn.__name__} | {named} | {warps} | {kept.registers} | {kept.spills} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", metavar="HARDWARE", help="write results/linear_HARDWARE_DATE.*")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to try the script")
    args = parser.parse_args()
    begun, tiny = time.monotonic(), args.tiny
    if not (INTERPRETED or torch.cuda.is_available()):
        print("bench_linear needs a GPU")
        return
    known = ", ".join(f"{name} {version}" for name, version in versions(DEVICE).items())
    head = [f"{hardware(DEVICE)}, {known}"]
    head.append(gate(10 if tiny else CASES_JUDGED))
    print("\n".join(head), flush=True)
    limits = ceilings(*((1, 128) if tiny else (512, 8192)))
    head.append(
        f"Ceilings in the same run: copy {limits['copy'] / 1e12:.2f} TB/s, bf16 "
        f"{limits['bf16'] / 1e12:.0f}, FP8 {limits.get('fp8', 0) / 1e12:.0f} TFLOP/s."
    )
    rows = []
    for case, others in rows_to_measure(tiny):
        rows.append(row_of(case, lambda arguments, c=case, o=others: o(arguments, c)))
        print(table(rows[-1:], limits)[-1], flush=True)
    head.append(f"The whole run took {time.monotonic() - begun:.0f} s.")
    lines = ["# MXFP4 and FP8 products", "", *head, "", *table(rows, limits), "", *compiled(), ""]
    print("\n".join(lines))
    if args.write:
        path = RESULTS / f"linear_{args.write}_{date.today()}"
        path.with_suffix(".md").write_text("\n".join(lines))
        path.with_suffix(".json").write_text(
            json.dumps({"head": head, "limits": limits, "rows": rows}, indent=1)
        )


if __name__ == "__main__":
    main()
