"""What the compilers make of the products, for GPUs that are not here: spills, widths, and where
decoded weights go. AMD: compiled, never run.
"""

import functools
import re

import pytest
import triton

from tests.kernels.compiled import OTHERS, TARGETS, Compiled, source_of
from tp3.kernels import fp8_linear, mxfp4_linear, mxfp4_moe
from tp3.kernels.split_k import combine_kernel

FEW, SOME, MANY = 0, 1, -1  # of the tiles
WHOLE = {"PARTIAL": False, "EARLY": False}
PARTS = {"PARTIAL": True, "EARLY": True}  # EARLY: from sm_90 on
MXFP4 = {"X_FP8": False, **WHOLE}
FP8 = {"X_FP8": False, "NATIVE": False, "X_BLOCKS": False, "W_BLOCKS": True, **PARTS}
E4M3 = {"X_FP8": True, "NATIVE": True, "X_BLOCKS": True, "W_BLOCKS": True, **WHOLE}
MOE = {"X_FP8": False, "EXPERTS": 512, "ONE_BY_ONE": False}
KERNELS = {
    "mxfp4": (mxfp4_linear, "mxfp4_linear_kernel", FEW, MXFP4),
    "mxfp4 many": (mxfp4_linear, "mxfp4_linear_kernel", MANY, {**MXFP4, **PARTS}),
    "moe": (mxfp4_moe, "mxfp4_moe_kernel", FEW, MOE),
    "fp8": (fp8_linear, "fp8_linear_kernel", MANY, FP8),
    "fp8 some": (fp8_linear, "fp8_linear_kernel", SOME, FP8),
    "fp8 e4m3": (fp8_linear, "fp8_linear_kernel", MANY, E4M3),
}
# Shared memory of a block, in bytes.
ROOM = {"sm_90": 232_448, "gfx1201": 65_536, "gfx942": 65_536, "gfx950": 163_840}
ROOM |= {"sm_80": 166_912, "sm_86": 101_376, "sm_89": 101_376, "sm_120": 101_376}


def can(to):
    """What only some GPUs do, as ``operands`` asks of them."""
    number = to.gpu.arch if to.code == "cuda" else 0
    return {"EARLY": number >= 90, "NATIVE": number >= 89}


@functools.cache
def made(name, target):
    """Compiled, its tile, and bytes of shared memory."""
    module, kernel_name, rows, constants = KERNELS[name]
    to, kernel = (TARGETS | OTHERS)[target], getattr(module, kernel_name)
    tiles = module.TILES.nvidia if to.code == "cuda" else module.TILES.amd
    tile = tiles[sorted(tiles)[rows]]
    constants = {**constants, **tile.constants, "TARGET": to.code}
    constants |= {
        name: constants[name] and able for name, able in can(to).items() if name in constants
    }
    options = {"num_warps": tile.warps, "enable_fp_fusion": False}
    built = triton.compile(source_of(kernel, constants), target=to.gpu, options=options)
    threads = tile.warps * to.gpu.warp_size
    binary = built.asm["cubin"] if to.code == "cuda" else None
    code = Compiled(built.asm[to.stage], to.dialect, threads, (0, 0), constants, binary)
    return code, tile, built.metadata.shared, built.asm["ttgir"]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", KERNELS)
def test_nothing_spills_and_memory_suffices(name, target, tmp_path):
    kernel, _, shared, _ = made(name, target)
    assert shared <= ROOM[target]
    if target == "sm_90":
        registers, stack = kernel.usage(tmp_path)
        assert (stack, registers * kernel.threads <= 65_536) == (0, True), registers
        return
    for key in (r"\.private_segment_fixed_size:", r"\.[sv]gpr_spill_count:", "; ScratchSize:"):
        assert set(re.findall(key + r"\s*(\d+)", kernel.text)) == {"0"}, key


@pytest.mark.parametrize("target", OTHERS)
@pytest.mark.parametrize("name", KERNELS)
def test_other_gpus_of_nvidia_take_them(name, target):
    kernel, _, shared, _ = made(name, target)
    assert shared <= ROOM[target]
    early = made(name, "sm_90")[0].constants.get("EARLY") and target == "sm_120"
    assert ("griddepcontrol" in kernel.text) == bool(early)


@pytest.mark.parametrize(("target", "early"), [("sm_90", True), ("sm_89", False)])
def test_the_kernel_that_adds_parts_waits_for_them_where_it_starts_early(target, early):
    to = (TARGETS | OTHERS)[target]
    constants = {"EARLY": can(to)["EARLY"], "TARGET": "cuda"}
    source, options = source_of(combine_kernel, constants), {"num_warps": 4}
    text = triton.compile(source, target=to.gpu, options=options).asm["ptx"]
    loads = text.index("ld.global")
    assert ("griddepcontrol.wait" in text[:loads]) == early
    assert "griddepcontrol" not in text[loads:]


def copied_bytes(text):
    """Of each asynchronous copy of a thread on an NVIDIA GPU."""
    found = re.findall(r"cp\.async\.\w+\.shared\.global.*?, (0x\w+|\d+)", text)
    return [int(width, 0) for width in found]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", KERNELS)
def test_weights_and_x_are_loaded_16_bytes_at_a_time(name, target):
    """What a slab takes of each, over the threads; scales and outputs may be narrow."""
    kernel, tile, _, _ = made(name, target)
    per_weight = 0.5 if "mxfp4" in name or name == "moe" else 1
    per_x = 1 if "e4m3" in name else 2
    vectors = tile.slab * (tile.n * per_weight + tile.m * per_x) / 16 / kernel.threads
    if target == "sm_90":
        widths = copied_bytes(kernel.text)
        copies = [width for width in widths if width == 16]
        assert set(widths) <= ({4, 16} if "fp8" in name else {16})  # scales of blocks are fp32
    else:
        kind = kernel.dialect.kind
        copies = [line for line in kernel.text.splitlines() if kind(line) == "given"]
    assert len(copies) >= vectors, (len(copies), vectors)


@pytest.mark.parametrize("name", [name for name in KERNELS if name != "fp8 e4m3"])
def test_decoded_weights_stay_in_registers(name):
    """On an NVIDIA GPU shared memory is written with x only, and read as weights were stored: a
    tile of bf16 would be as many bytes four times over, there and back.
    """
    _, tile, _, graph = made(name, "sm_90")
    decoded = rf"local_load .*tensor<{tile.n}x\d+xbf16, #ttg\.dot_op"
    assert not re.findall(decoded, graph)
    assert re.findall(rf"warp_group_dot .*tensor<{tile.n}x\d+xbf16, #ttg\.dot_op", graph)


def test_narrow_copies_are_seen():
    lines = ["cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r2;",
             "cp.async.ca.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x4, %r2;"]  # fmt: skip
    assert copied_bytes("\n".join(lines)) == [16, 4]
