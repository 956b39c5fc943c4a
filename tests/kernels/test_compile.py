"""What the compiler makes of the kernels' ordering, widths and registers, read from assembly.

No GPU is needed. AMD: compiled, never run. The orders are those of ``kernels.primitives``; that the
reading is not blind is shown by taking the lines of each step out, which must be rejected.
"""

import functools
import re

import pytest
import torch

from tests.kernels.assembly import PTX, without
from tests.kernels.compiled import LAUNCHERS, OTHERS, TARGETS, compiled
from tests.kernels.paths import Order, violations

made = functools.cache(compiled)

PUSH_STEPS = {
    "cuda": ("barrier",),
    "gfx9": ("write-back", "drained", "barrier"),
    "gfx12": ("drained", "barrier", "write-back", "drained"),
}
READ_STEPS = {"cuda": ("barrier",), "gfx9": ("drained", "barrier"), "gfx12": ("loaded", "barrier")}
WAIT_STEPS = {
    "cuda": ("poll", "barrier"),
    "gfx9": ("poll", "drained", "invalidate", "barrier"),
    "gfx12": ("poll", "loaded", "invalidate", "barrier"),
}
CASES = [
    *(
        (target, launcher, 3)
        for target in TARGETS
        for launcher in LAUNCHERS
        if launcher != "sentinel"
    ),
    ("sm_90", "two-shot", 16),
    ("gfx942", "one-shot", 16),
]
NARROW = {
    "ptx": r"\b(?:ld|st)\.(?:volatile\.)?global\S*\.[bsu](?:8|16)\b",
    "amdgcn": r"\b(?:global|buffer|flat)_(?:load|store)_(?:[us]?byte|[us]?short|[bui](?:8|16)|d16)",
}


def orders(code, launcher):
    """By name; see ``assembly`` for the kinds of events."""
    moves = launcher.startswith("exchange")
    yield "pushed, then published", Order("vector", PUSH_STEPS[code], "publish")
    yield "read, then published", Order("pulled", READ_STEPS[code], "publish")
    yield (
        "published, waited, then read",
        Order("publish", WAIT_STEPS[code], "pulled", renewed_by="poll", from_start=moves),
    )
    if moves:
        yield "header, then published", Order("long", PUSH_STEPS[code], "publish")
    if code == "cuda":
        yield "words on the page, then the code", Order("word", PUSH_STEPS[code], "tell")


@pytest.mark.parametrize(("target", "launcher", "world_size"), CASES, ids=lambda v: str(v))
def test_what_comes_before_what(target, launcher, world_size):
    kernel = made(launcher, target, world_size)
    for name, order in orders(TARGETS[target].code, launcher):
        assert not violations(kernel.text, kernel.dialect, order), name
        for step in order.then:
            broken = without(kernel.text, kernel.dialect, step)
            assert violations(broken, kernel.dialect, order), f"{name}: {step} is not needed"


def test_present_but_skipped_is_rejected():
    """A barrier on one of two paths, and one that stands before the store, though after it in the
    text."""
    order = Order("vector", ("barrier",), "publish")
    store, barrier = "st.global.v4.b32 [%rd1 + 0], {%r1};", "bar.sync 0;"
    publish, to = "@%p st.release.sys.global.u32 [%rd2], %r2;", "$L__BB0_"
    right = [store, barrier, publish, "ret;"]
    skipped = [store, f"@%p1 bra {to}1;", barrier, f"{to}1:", publish, "ret;"]
    backwards = [f"bra.uni {to}2;", f"{to}1:", store, publish, "ret;", f"{to}2:", barrier,
                 f"bra.uni {to}1;"]  # fmt: skip
    texts = [
        "\n".join(f"\t{x}" if x[0] != "$" else x for x in t) for t in (right, skipped, backwards)
    ]
    assert [violations(text, PTX, order) for text in texts] == [[], [5], [4]]
    with pytest.raises(AssertionError, match="no path has"):
        violations(texts[0].replace("st.global", "st.shared"), PTX, order)


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("target", TARGETS)
def test_payload_moves_in_vectors_of_16_bytes(target, launcher):
    if launcher == "sentinel" and target != "sm_90":
        return  # NVIDIA only
    kernel = made(launcher, target, 3)
    assert not re.findall(NARROW[TARGETS[target].stage], kernel.text)
    count = {kind: 0 for kind, _ in kernel.dialect.events}
    for line in kernel.text.splitlines():
        if kind := kernel.dialect.kind(line):
            count[kind] += 1
    if launcher.startswith("exchange"):
        assert min(count["given"], count["pulled"], count["vector"]) > 0
        return
    constants = kernel.constants
    each = constants["TILE"] * 2 // (16 * kernel.threads)  # vectors of a thread, bf16
    peers = constants["WORLD"] - 1
    want = {  # read from x, read from the slots, written to slots and out
        "one-shot": (1, peers, peers + 1),
        "reduce-scatter": (peers + 1, peers, peers + 1),
        "two-shot": (peers + 1, 2 * peers, 2 * peers + peers + 1),
        "sentinel": (2, 0, 2 * peers + 1),
    }[launcher]
    want = tuple(each * n for n in want)
    got = count["given"], count["pulled"], count["vector"]
    if target == "sm_90":
        assert got == want
    else:  # the compiler may repeat code
        assert all(g >= w for g, w in zip(got, want)), (got, want)


def test_instructions_of_nvidia_gpus():
    """Flags: release and acquire at system scope. Sentinel: volatile reads, no flag, no cache."""
    for launcher in LAUNCHERS:
        kinds = [
            kind
            for line in made(launcher, "sm_90", 3).text.splitlines()
            if (kind := PTX.kind(line))
        ]
        flags = launcher != "sentinel"
        assert ("publish" in kinds, "poll" in kinds, "pulled" in kinds) == (flags,) * 3, launcher
        assert ("volatile" in kinds) is not flags, launcher
    for launcher in LAUNCHERS[:4]:
        text = made(launcher, "sm_90", 3, torch.bfloat16, "SUM").text
        assert "fma." not in text, "a fused multiply-add rounds once where the sum rounds twice"
        assert "cvt.rn.bf16" in text, "to nearest even"
        assert not re.search(r"\b(?:add|mul|div|cvt)\S*\.ftz", text), "subnormals are kept"


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("target", list(TARGETS)[1:])
def test_nothing_spills_on_amd_gpus(target, launcher):
    if launcher == "sentinel":
        return
    text = made(launcher, target, 3).text
    for name in (r"\.private_segment_fixed_size:", r"\.[sv]gpr_spill_count:", "; ScratchSize:"):
        assert set(re.findall(name + r"\s*(\d+)", text)) == {"0"}, name


SPILLED_BYTES = {"one-shot": 64, "reduce-scatter": 64}  # of a thread
REGISTERS = [
    *(
        (name, torch.bfloat16, op, w)
        for name in LAUNCHERS[:4]
        for op in ("SUM", "AVG")
        for w in (2, 3)
    ),
    ("one-shot", torch.float32, "SUM", 3),
    ("two-shot", torch.float64, "AVG", 3),
    ("one-shot", torch.int8, "MIN", 3),
    ("two-shot", torch.uint8, "AVG", 5),
    ("two-shot", torch.bfloat16, "SUM", 16),
    *((name, torch.uint8, align, 3) for name in LAUNCHERS[4:] for align in (16, 4, 1)),
]


@pytest.mark.parametrize(
    ("launcher", "dtype", "what", "world_size"), REGISTERS,
    ids=lambda v: str(v).removeprefix("torch."),
)  # fmt: skip
def test_registers_are_as_few_as_the_grid_counts_on(launcher, dtype, what, world_size, tmp_path):
    """Blocks of all ranks on a GPU must fit on it at once: the grid follows from threads and
    registers, which the compiler must keep to. One-shot pays with a few spilled registers.
    """
    align = what if isinstance(what, int) else 16
    op = what if isinstance(what, str) else "SUM"
    kernel = made(launcher, "sm_90", world_size, dtype, op, align)
    registers, stack = kernel.usage(tmp_path)
    threads, counted_on = kernel.asked
    assert threads == kernel.threads
    assert -(-registers // 8) * 8 <= counted_on, "registers are given out in eights"
    if world_size <= 3 and dtype.is_floating_point:
        assert stack <= SPILLED_BYTES.get(launcher, 0)


@pytest.mark.parametrize("target", OTHERS)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_other_gpus_of_nvidia_take_them(launcher, target, tmp_path):
    kernel = made(launcher, target, 3)
    registers, _ = kernel.usage(tmp_path)
    threads, counted_on = kernel.asked
    assert threads == kernel.threads
    assert -(-registers // 8) * 8 <= counted_on
