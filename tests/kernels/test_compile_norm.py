"""What the compilers make of the norm, fused and plain: widths, spills, registers, and that both
add a row's squares in one order. AMD, where only the plain kernel runs: compiled, never run.
"""

import functools
import re

import pytest
import torch
import triton

from tests.kernels.compiled import OTHERS, TARGETS, Compiled, Recorder, source_of
from tests.kernels.test_compile import NARROW
from tp3.comm.transport import device_kernels as kernels
from tp3.kernels.norm import add_rms_norm_kernel, constants_of, warps_of
from tp3.kernels.normed import Norm, empty

QUANTS = [None, "token", "group"]
WIDTHS = [1000, 5120, 16384]
NVIDIA = ["sm_90", *OTHERS]
SPILLED_BYTES = {(16384, "group"): 8}  # of a thread, by triton 3.9


def can(to):
    """Whether the GPU rounds to e4m3."""
    return to.code == "cuda" and to.gpu.arch >= 89


def fused(width, norm, to, world_size):
    """Constants, warps, registers, and what the grid was computed from."""
    recorder = Recorder(world_size, to.code)
    recorder.device = None
    before = kernels.Kept, kernels.multiplies_e4m3
    kernels.Kept, kernels.multiplies_e4m3 = recorder.keep, lambda device: can(to)
    try:
        x = torch.zeros(3, width, dtype=torch.bfloat16)
        kernels.all_reduce_norm(recorder, x, x, x[0], norm, empty(x, norm))
    finally:
        kernels.Kept, kernels.multiplies_e4m3 = before
    return *recorder.made, recorder.asked


def plain(width, norm, to):
    constants = constants_of(width, norm, to.code, native=can(to))
    return add_rms_norm_kernel, constants, warps_of(width, to.code), None, (0, 0)


@functools.cache
def made(kind, width, quant, target, world_size=3):
    """Compiled, and its graph of tensors with their layouts."""
    to, norm = (TARGETS | OTHERS)[target], Norm(1e-6, True, quant)
    args = (world_size,) if kind == "fused" else ()
    kernel, constants, warps, registers, asked = {"fused": fused, "plain": plain}[kind](
        width, norm, to, *args
    )
    options = {"num_warps": warps, "enable_fp_fusion": False}
    if registers:
        options["maxnreg"] = registers
    built = triton.compile(source_of(kernel, constants), target=to.gpu, options=options)
    binary = built.asm["cubin"] if to.code == "cuda" else None
    threads = warps * to.gpu.warp_size
    code = Compiled(built.asm[to.stage], to.dialect, threads, asked, constants, binary)
    return code, built.asm["ttgir"]


@pytest.mark.parametrize("world_size", [2, 3, 8])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("quant", QUANTS)
def test_a_fused_block_has_the_registers_that_the_grid_counts_on(
    quant, width, world_size, tmp_path
):
    kernel, _ = made("fused", width, quant, "sm_90", world_size)
    registers, stack = kernel.usage(tmp_path)
    threads, counted_on = kernel.asked
    assert threads == kernel.threads
    assert -(-registers // 8) * 8 <= counted_on
    if world_size <= 3:
        assert stack <= SPILLED_BYTES.get((width, quant), 0)


@pytest.mark.parametrize("target", OTHERS)
def test_other_gpus_of_nvidia_take_it(target, tmp_path):
    for quant in QUANTS:
        kernel, _ = made("fused", 5120, quant, target)
        registers, _ = kernel.usage(tmp_path)
        assert -(-registers // 8) * 8 <= kernel.asked[1]
        native = "e4m3x2" in kernel.text
        assert native == (quant is not None and can(OTHERS[target])), "NVIDIA's own from sm_89 on"


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("quant", QUANTS)
def test_the_plain_kernel_spills_nothing(quant, width, target, tmp_path):
    kernel, _ = made("plain", width, quant, target)
    assert kernel.threads <= 1024
    if target == "sm_90":
        assert kernel.usage(tmp_path)[1] == 0
        return
    for key in (r"\.private_segment_fixed_size:", r"\.[sv]gpr_spill_count:", "; ScratchSize:"):
        assert set(re.findall(key + r"\s*(\d+)", kernel.text)) == {"0"}, key


@pytest.mark.parametrize(
    ("kind", "target"), [*(("plain", target) for target in TARGETS), ("fused", "sm_90")]
)
@pytest.mark.parametrize("quant", QUANTS)
def test_rows_move_in_vectors_of_16_bytes(quant, kind, target):
    """e4m3 are half as wide as what they come from, so 8 bytes of them."""
    for width in WIDTHS:
        kernel, _ = made(kind, width, quant, target)
        assert not re.findall(NARROW[TARGETS[target].stage], kernel.text)
        count = {name: 0 for name, _ in kernel.dialect.events}
        for line in kernel.text.splitlines():
            if name := kernel.dialect.kind(line):
                count[name] += 1
        each = -(-width // (8 * kernel.threads))  # vectors of a thread
        given, stored = (3, 1) if kind == "plain" else (4, 5)
        assert count["given"] >= given * each
        assert count["vector"] >= (stored + (quant is None)) * each
        assert kind == "plain" or count["volatile"] >= 2 * 2 * each


def layouts(graph):
    """Of what is reduced by additions: the definitions of the layouts, with their names gone."""
    named = dict(re.findall(r"^(#blocked\d*) = (.*)$", graph, re.M))
    sums = re.findall(
        r'"tt\.reduce"\(%\w+\)(?:(?!tt\.reduce\.return).)*?arith\.addf(?:(?!\}\)).)*?\}\) : '
        r"\(tensor<(\d+)xf32, (#\w+)>",
        graph,
        re.S,
    )
    assert sums, "no sum of a row was found"
    return {(size, named[name]) for size, name in sums}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("quant", QUANTS)
def test_both_kernels_add_squares_in_one_order(quant, width):
    ours, theirs = (layouts(made(kind, width, quant, "sm_90")[1]) for kind in ("fused", "plain"))
    assert ours == theirs
    assert len(ours) == 1


@pytest.mark.parametrize("kind", ["fused", "plain"])
def test_instructions_that_round(kind):
    """To nearest even, without fused multiply-adds in the sums of the formulas; subnormals stay."""
    text = made(kind, 5120, "token", "sm_90")[0].text
    assert "cvt.rn.bf16" in text
    assert "cvt.rn.satfinite.e4m3x2" in text
    assert "div.rn.f32" in text
    assert "sqrt.rn.f32" in text
    assert "fma." not in text
    assert not re.search(r"\b(?:add|mul|div|sqrt|cvt)\S*\.ftz", text)
    volatile = re.search(r"ld\.volatile\.global\.v[24]", text)
    assert bool(volatile) == (kind == "fused")
