"""What the compiler makes of the product for few rows, for NVIDIA GPUs that are not here."""

import functools
import re

import pytest
import triton

from tests.kernels.compiled import OTHERS, TARGETS, Compiled, source_of
from tp3.kernels.mxfp4_few import STRAIGHT, TILES, mxfp4_few_kernel

TILE = TILES.nvidia[8]
GPUS = ("sm_90", "sm_120")
BLOCKS_AT_ONCE = 4  # of a multiprocessor of 65,536 registers


@functools.cache
def made(target, partial):
    to = (TARGETS | OTHERS)[target]
    constants = {"PARTIAL": partial, "EARLY": partial, **TILE.constants, "TARGET": to.code}
    options = {"num_warps": TILE.warps, "enable_fp_fusion": False}
    built = triton.compile(source_of(mxfp4_few_kernel, constants), target=to.gpu, options=options)
    threads = 32 * TILE.warps
    code = Compiled(built.asm["ptx"], to.dialect, threads, (0, 0), constants, built.asm["cubin"])
    return code, built.asm["ttgir"]


@pytest.mark.parametrize("partial", [True, False])
@pytest.mark.parametrize("target", GPUS)
def test_nothing_spills_and_four_blocks_fit_where_weights_stay_in_registers(
    target, partial, tmp_path
):
    registers, stack = made(target, partial)[0].usage(tmp_path)
    assert stack == 0
    most = 65_536 // (32 * TILE.warps)
    assert registers <= (most // BLOCKS_AT_ONCE if STRAIGHT else most)


@pytest.mark.parametrize("target", GPUS)
def test_the_kernel_is_taken_where_decoded_weights_stay_in_registers(target):
    """Nothing goes through shared memory before the parts of the warps are added."""
    graph = made(target, True)[1]
    before = graph[: graph.index('"tt.reduce"')]
    assert ("local_alloc" not in before and "local_load" not in before) == STRAIGHT
    assert "mma.sync" in made(target, True)[0].text


@pytest.mark.parametrize("target", GPUS)
def test_weights_and_x_are_loaded_16_bytes_at_a_time(target):
    text = made(target, True)[0].text
    loads = re.findall(r"ld\.global\S*", text)
    wide = [each for each in loads if ".v4.b32" in each]
    narrow = [each for each in loads if ".b8" in each]
    assert len(wide) + len(narrow) == len(loads)
    # Of a thread and slab: TILE.n / 8 blocks, four vectors of x, a code for each block; the first
    # slab and the next, for both ways to multiply.
    assert (len(wide), len(narrow)) == (4 * (TILE.n // 8 + 4), 4 * (TILE.n // 8))


@pytest.mark.parametrize("target", GPUS)
def test_it_lets_the_adding_kernel_start_and_waits_for_nothing(target):
    for partial in (True, False):
        text = made(target, partial)[0].text
        assert ("griddepcontrol.launch_dependents" in text) == partial
        assert "griddepcontrol.wait" not in text
