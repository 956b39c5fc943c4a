"""Which algorithm carries a collective: rows of a table, read from the top; the first that fits
runs.

Every rank must pick the same row, so a row sees only what all ranks share: the collective, world
size, dtype, bytes, the kind of device, whether all ranks are on one host, and the group's settings.
Thresholds are data, the measurement beside them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tp3.comm.layout import sentinel_bytes
from tp3.comm.settings import ALLREDUCE_CHOICES

FUSED = "all_reduce_rms_norm"
SUMMED = ("all_reduce", "reduce", "reduce_scatter", FUSED)
MOVED = ("broadcast", "all_gather", "all_to_all", "gather", "scatter")
COLLECTIVES = SUMMED + MOVED
DEVICES = ("cpu", "cuda", "hip")
OPS = ("SUM", "AVG", "PREMUL_SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")

FLOATS = ("float64", "float32", "float16", "bfloat16")
INTEGERS = ("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64", "bool")
COMPLEX = ("complex64", "complex128")
FP8 = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")
OTHER = ("complex32", "float4_e2m1fn_x2")
SUMMABLE = frozenset(FLOATS + INTEGERS + COMPLEX)
DTYPES = SUMMABLE | frozenset(FP8 + OTHER)

# 2-core Xeon VM, torch 2.13, W=3, fp32: one-shot / two-shot 115 / 132 µs at 16 KiB, 148 / 132 at
# 32 KiB, 247 / 176 at 64 KiB (2026-11-29).
TWO_SHOT_FROM_BYTES = 32 << 10
# H200, bf16, graph, W=2: benchmarks/results/allreduce-shapes_2xh200_2026-11-29.md.
# A second trip costs about 3 µs, in which a link of 300 GB/s moves this much.
TRIP_BYTES = 900_000
# The exact sum moves W × nbytes between hosts, the hierarchical one 2 × nbytes.
EXACT_ACROSS_HOSTS_TO_BYTES = 64 << 10
GLOO_OPS = ("SUM", "AVG", "PREMUL_SUM", "PRODUCT", "MIN", "MAX")


def one_shot_to_bytes(world_size: int) -> float:
    """Up to here one-shot's (W-1) S bytes cost less than two-shot's 2 (W-1)/W S and a trip more."""
    saved = (world_size - 1) * (world_size - 2) / world_size
    return TRIP_BYTES / saved if saved else float("inf")


@dataclass(frozen=True, kw_only=True)
class Request:
    """What all ranks know of a call. ``nbytes`` is the size of the tensor on one rank; ``reach``:
    the ranks share device memory.
    """

    collective: str
    world_size: int
    dtype: str = "float32"
    nbytes: int = 0
    exact: bool = True
    device: str = "cpu"
    reach: bool = False
    hosts: int = 1
    op: str = "SUM"
    force: str = "auto"

    def __post_init__(self) -> None:
        for what, got, allowed in (
            ("collective", self.collective, COLLECTIVES),
            ("dtype", self.dtype, sorted(DTYPES)),
            ("device", self.device, DEVICES),
            ("op", self.op, OPS),
            ("TP3_ALLREDUCE", self.force, ALLREDUCE_CHOICES),
        ):
            if got not in allowed:
                raise ValueError(f"{what} is {got!r}; allowed: {', '.join(allowed)}")
        if self.world_size < 1 or self.nbytes < 0 or self.hosts < 1:
            raise ValueError(
                f"world_size {self.world_size}, nbytes {self.nbytes}, hosts {self.hosts}: "
                "world_size and hosts start at 1, nbytes at 0"
            )
        if self.collective in SUMMED and self.dtype not in SUMMABLE:
            raise ValueError(
                f"{self.collective} cannot add {self.dtype}; allowed: {', '.join(sorted(SUMMABLE))}"
            )


Condition = tuple[str, Callable[[Request], bool]]


@dataclass(frozen=True)
class Row:
    """One algorithm. ``launcher`` is ``module:function``, so that this table imports nothing;
    ``medium`` is what it runs over: "host", "device", "staged" (a device's data on the host) or
    "rows" (other rows).
    """

    name: str
    what: str
    world_sizes: str
    exact: bool
    launcher: str
    conditions: tuple[Condition, ...]
    medium: str = "host"

    def rejection(self, request: Request) -> str | None:
        """Why this row does not take the request, in a sentence; None when it does."""
        for needed, holds in self.conditions:
            if not holds(request):
                return f"needs {needed}"
        return None


def _collective(*names: str) -> Condition:
    return " or ".join(names), lambda r: r.collective in names


_ONE_HOST: Condition = ("all ranks on one host", lambda r: r.hosts == 1)
_HOSTS: Condition = ("ranks on several hosts", lambda r: r.hosts > 1)
_PLAIN: Condition = ("a collective of torch.distributed", lambda r: r.collective != FUSED)
_CPU: Condition = ("CPU tensors", lambda r: r.device == "cpu")
_GPU: Condition = ("tensors on a GPU", lambda r: r.device != "cpu")
_REACH: Condition = ("ranks that share device memory", lambda r: r.reach)
_ONE_TRIP: Condition = (
    "a message for which one trip is faster than fewer bytes, or a forced choice",
    lambda r: r.nbytes <= one_shot_to_bytes(r.world_size) or r.force in ("sentinel", "one-shot"),
)

# What the sentinel kernel needs, and the fused one, which sums as it does.
_SENTINEL: tuple[Condition, ...] = (
    ("tensors on an NVIDIA GPU", lambda r: r.device == "cuda"),
    _REACH,
    ("float32, float16 or bfloat16", lambda r: r.dtype in FLOATS[1:]),
    ("SUM, AVG or PREMUL_SUM", lambda r: r.op in OPS[:3]),
    ("TP3_ALLREDUCE=auto or sentinel", lambda r: r.force in ("auto", "sentinel")),
    _ONE_TRIP,
    (
        "a message that fits its slots",
        lambda r: r.world_size > 1 and r.nbytes <= sentinel_bytes(r.world_size),
    ),
)

ROWS: tuple[Row, ...] = (
    Row(
        "gpu-nq",
        "the sentinel's sum, residual add, RMSNorm and FP8 in one kernel, a row in a block",
        world_sizes="2..16",
        exact=True,
        launcher="tp3.comm.collectives.device:nq",
        conditions=(_collective(FUSED), *_SENTINEL),
        medium="device",
    ),
    Row(
        "steps",
        "the all-reduce by its own row, then residual add, RMSNorm and FP8 of its sum",
        world_sizes="any",
        exact=True,
        launcher="tp3.comm.collectives.steps:all_reduce_rms_norm",
        conditions=(_collective(FUSED),),
        medium="rows",
    ),
    Row(
        "identity",
        "a group of one: the tensor is its own sum",
        world_sizes="1",
        exact=True,
        launcher="tp3.comm.collectives.identity:{collective}",
        conditions=(_PLAIN, ("world size 1", lambda r: r.world_size == 1)),
    ),
    Row(
        "gpu-sentinel",
        "each rank pushes its whole message; the data say themselves that they have come",
        world_sizes="2..16",
        exact=True,
        launcher="tp3.comm.collectives.device:sentinel",
        conditions=(_collective("all_reduce"), *_SENTINEL),
        medium="device",
    ),
    Row(
        "gpu-one-shot",
        "each rank pushes its whole message to every peer, everybody sums all in rank order",
        world_sizes="2..16",
        exact=True,
        launcher="tp3.comm.collectives.device:one_shot",
        conditions=(
            _collective("all_reduce"),
            _GPU,
            _REACH,
            ("TP3_ALLREDUCE other than two-shot", lambda r: r.force != "two-shot"),
            _ONE_TRIP,
        ),
        medium="device",
    ),
    Row(
        "gpu-two-shot",
        "each rank sums the part it owns in rank order, then pushes the sum to every peer",
        world_sizes="2..16",
        exact=True,
        launcher="tp3.comm.collectives.device:two_shot",
        conditions=(_collective("all_reduce"), _GPU, _REACH),
        medium="device",
    ),
    Row(
        "gpu-sums",
        "one-shot with another part for each rank, or for the root alone",
        world_sizes="2..16",
        exact=True,
        launcher="tp3.comm.collectives.device:{collective}",
        conditions=(_collective("reduce", "reduce_scatter"), _GPU, _REACH),
        medium="device",
    ),
    Row(
        "gpu-exchange",
        "bytes between pairs of ranks through rings in device memory",
        world_sizes="2..16",
        exact=True,
        launcher="tp3.comm.collectives.device:{collective}",
        conditions=(_collective(*MOVED), _GPU, _REACH),
        medium="device",
    ),
    Row(
        "gpu-through-host",
        "copied to the host, served there, copied back; not in graphs",
        world_sizes="any",
        exact=True,
        launcher="tp3.comm.collectives.staged:{collective}",
        conditions=(_PLAIN, _GPU),
        medium="staged",
    ),
    Row(
        "one-shot",
        "each rank publishes its whole message, everybody sums all of them in rank order",
        world_sizes="any",
        exact=True,
        launcher="tp3.comm.collectives.allreduce:one_shot",
        conditions=(
            _collective("all_reduce"),
            _CPU,
            _ONE_HOST,
            ("TP3_ALLREDUCE other than two-shot", lambda r: r.force != "two-shot"),
            (
                f"less than {TWO_SHOT_FROM_BYTES} bytes",
                lambda r: r.nbytes < TWO_SHOT_FROM_BYTES or r.force == "one-shot",
            ),
        ),
    ),
    Row(
        "two-shot",
        "each rank sums the part it owns in rank order, then everybody gathers the parts",
        world_sizes="any",
        exact=True,
        launcher="tp3.comm.collectives.allreduce:two_shot",
        conditions=(_collective("all_reduce"), _CPU, _ONE_HOST),
    ),
    Row(
        "shared-memory",
        "pieces through the slots of the shared segment, sums in rank order",
        world_sizes="any",
        exact=True,
        launcher="tp3.comm.collectives.sums:{collective}",
        conditions=(_collective("reduce", "reduce_scatter"), _CPU, _ONE_HOST),
    ),
    Row(
        "shared-memory",
        "pieces through the slots of the shared segment",
        world_sizes="any",
        exact=True,
        launcher="tp3.comm.collectives.moves:{collective}",
        conditions=(_collective(*MOVED), _CPU, _ONE_HOST),
    ),
    Row(
        "hierarchical",
        "sums in shared memory, all-reduce between hosts over Gloo, all-gather in shared memory",
        world_sizes="any",
        exact=False,
        launcher="tp3.comm.collectives.hosts:hierarchical",
        conditions=(
            _collective("all_reduce"),
            _CPU,
            _HOSTS,
            ("an op that Gloo has", lambda r: r.op in GLOO_OPS),
            ("a floating-point dtype", lambda r: r.dtype in FLOATS),
            (
                f"more than {EXACT_ACROSS_HOSTS_TO_BYTES} bytes",
                lambda r: r.nbytes > EXACT_ACROSS_HOSTS_TO_BYTES,
            ),
        ),
    ),
    Row(
        "delegate",
        "bytes moved by Gloo, sums in rank order",
        world_sizes="any",
        exact=True,
        launcher="tp3.comm.collectives.hosts:{collective}",
        conditions=(_PLAIN, _CPU, _HOSTS),
    ),
)


@lru_cache(maxsize=4096)
def choose(request: Request) -> Row:
    """The first row that takes the request."""
    return next(row for row, rejection in explain(request) if rejection is None)


def select(collective: str, *, world_size: int, **what: Any) -> Row:
    """``choose`` for the fields of ``Request``; ValueError names a field that no row can know."""
    return choose(Request(collective=collective, world_size=world_size, **what))


def explain(request: Request) -> tuple[tuple[Row, str | None], ...]:
    """Every row with its verdict: None when it fits, otherwise a sentence. The first None runs."""
    return tuple((row, row.rejection(request)) for row in ROWS)
