"""What the compiler makes of the products for few rows, for NVIDIA GPUs that are not here."""

import functools
import re
from dataclasses import dataclass
from typing import Any

import pytest
import triton

from tests.kernels.compiled import OTHERS, TARGETS, Compiled, source_of
from tp3.kernels.few import STRAIGHT, TILES
from tp3.kernels.fp8_few import fp8_few_kernel
from tp3.kernels.mxfp4_few import mxfp4_few_kernel

TILE = TILES.nvidia[8]
GPUS = ("sm_90", "sm_120")
BLOCKS_AT_ONCE = 4  # of a multiprocessor of 65,536 registers
PRODUCTS = TILE.n // 16 * (TILE.slab // TILE.warps // 16)  # of a warp and slab, 16 x 8 x 16 each


@dataclass(frozen=True)
class Few:
    """Loads of a thread, narrow ones by their kind and number. Wide ones, of weights and of x: of
    the first slab and the next, for each way to multiply.
    """

    kernel: Any
    ways: int
    wide: int  # of a slab
    narrow: tuple[str, int]


KERNELS = {
    "mxfp4": Few(mxfp4_few_kernel, 2, TILE.n // 8 + 4, (".b8", 4 * (TILE.n // 8))),  # codes
    "fp8": Few(fp8_few_kernel, 1, 2 * (TILE.n // 8) + 4, (".b32", 1)),  # a scale of the slab
}


@functools.cache
def made(name, target, partial):
    to, kernel = (TARGETS | OTHERS)[target], KERNELS[name].kernel
    constants = {"PARTIAL": partial, "EARLY": partial, **TILE.constants, "TARGET": to.code}
    options = {"num_warps": TILE.warps, "enable_fp_fusion": False}
    built = triton.compile(source_of(kernel, constants), target=to.gpu, options=options)
    threads = 32 * TILE.warps
    code = Compiled(built.asm["ptx"], to.dialect, threads, (0, 0), constants, built.asm["cubin"])
    return code, built.asm["ttgir"]


@pytest.mark.parametrize("partial", [True, False])
@pytest.mark.parametrize("target", GPUS)
@pytest.mark.parametrize("name", KERNELS)
def test_nothing_spills_and_four_blocks_fit_where_weights_stay_in_registers(
    name, target, partial, tmp_path
):
    registers, stack = made(name, target, partial)[0].usage(tmp_path)
    assert stack == 0
    most = 65_536 // (32 * TILE.warps)
    assert registers <= (most // BLOCKS_AT_ONCE if STRAIGHT else most)


@pytest.mark.parametrize("target", GPUS)
@pytest.mark.parametrize("name", KERNELS)
def test_the_kernels_are_taken_where_decoded_weights_stay_in_registers(name, target):
    """Nothing goes through shared memory before the parts of the warps are added."""
    graph = made(name, target, True)[1]
    before = graph[: graph.index('"tt.reduce"')]
    assert ("local_alloc" not in before and "local_load" not in before) == STRAIGHT


@pytest.mark.parametrize("target", GPUS)
@pytest.mark.parametrize("name", KERNELS)
def test_a_slab_is_multiplied_before_a_thread_hears_of_another(name, target):
    """Nor does anything go from lane to lane: each multiplies what it has loaded."""
    text = made(name, target, True)[0].text
    assert text.count("mma.sync") == KERNELS[name].ways * PRODUCTS
    before = re.split(r"\b(?:(?:ld|st)\.shared|(?:ld|st)matrix|bar\.sync|shfl)", text)[0]
    assert (before.count("mma.sync") == PRODUCTS) == STRAIGHT


@pytest.mark.parametrize("target", GPUS)
@pytest.mark.parametrize("name", KERNELS)
def test_weights_and_x_are_loaded_16_bytes_at_a_time(name, target):
    few, loads = KERNELS[name], re.findall(r"ld\.global\S*", made(name, target, True)[0].text)
    kind, count = few.narrow
    wide = [each for each in loads if ".v4.b32" in each]
    narrow = [each for each in loads if each.endswith(kind) and each not in wide]
    assert len(wide) + len(narrow) == len(loads)
    assert (len(wide), len(narrow)) == (2 * few.ways * few.wide, count)


@pytest.mark.parametrize("target", GPUS)
@pytest.mark.parametrize("name", KERNELS)
def test_they_let_the_adding_kernel_start_and_wait_for_nothing(name, target):
    for partial in (True, False):
        text = made(name, target, partial)[0].text
        assert ("griddepcontrol.launch_dependents" in text) == partial
        assert "griddepcontrol.wait" not in text
