"""What one run measures, checked; knows no torch."""

from __future__ import annotations

from dataclasses import dataclass

DTYPES = ("bfloat16", "float16", "float32")
MODES = {"cuda": ("graph", "eager"), "cpu": ("eager",)}
KIB = (8, 80, 256, 1024, 4096, 16384, 65536)
MAX_KIB = 1 << 20
WORLD_SIZES = range(2, 17)
REPEATS = range(3, 1001)

SMALL_BYTES = 1 << 20
# Calls of one turn, up to SMALL_BYTES and above: a few hundred µs, so that starting a turn is small
# beside it, and few enough that every call has a buffer of its own.
CALLS = {("cuda", "graph"): (20, 4), ("cuda", "eager"): (50, 8), ("cpu", "eager"): (10, 1)}
# What all buffers of a turn may take together.
BUDGET_BYTES = 256 << 20


@dataclass(frozen=True)
class Plan:
    """One run: every size in every mode, on `world_size` ranks of this machine.

    kib: sizes of the tensor on a rank, in KiB; ascending and without duplicates once checked.
    repeats: turns of each peer that count.
    timeout: seconds, of a call and, plus the start of the ranks, of the whole run.
    """

    world_size: int
    device: str
    dtype: str = "bfloat16"
    kib: tuple[int, ...] = KIB
    modes: tuple[str, ...] = ()
    repeats: int = 21
    timeout: float = 300.0

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("device", self.device, tuple(MODES)),
            ("dtype", self.dtype, DTYPES),
        ):
            if value not in allowed:
                raise ValueError(f"{name} is {value!r}; allowed: {', '.join(allowed)}")
        for name, number, numbers in (
            ("world size", self.world_size, WORLD_SIZES),
            ("repeats", self.repeats, REPEATS),
        ):
            if number not in numbers:
                raise ValueError(f"{name} is {number}; it must be in {numbers[0]}..{numbers[-1]}")
        for kib in self.kib:
            if not 1 <= kib <= MAX_KIB:
                raise ValueError(f"a size is {kib} KiB; it must be in 1..{MAX_KIB}")
        for mode in self.modes:
            if mode not in MODES[self.device]:
                allowed_modes = ", ".join(MODES[self.device])
                raise ValueError(f"mode is {mode!r}; allowed on {self.device}: {allowed_modes}")
        if not self.kib:
            raise ValueError("no sizes given; name at least one in KiB")
        if self.timeout <= 0:
            raise ValueError(f"timeout is {self.timeout:g} s; it must be positive")
        object.__setattr__(self, "kib", tuple(sorted(set(self.kib))))
        object.__setattr__(self, "modes", tuple(dict.fromkeys(self.modes)) or MODES[self.device])

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of the tensor on a rank."""
        return tuple(kib << 10 for kib in self.kib)

    def calls(self, mode: str, nbytes: int) -> int:
        """Calls, and buffers, of one turn."""
        small, large = CALLS[self.device, mode]
        return max(1, min(small if nbytes <= SMALL_BYTES else large, BUDGET_BYTES // nbytes))

    @property
    def room_bytes(self) -> int:
        """Bytes of the buffers of the largest turn."""
        return max(self.calls(mode, size) * size for mode in self.modes for size in self.sizes)
