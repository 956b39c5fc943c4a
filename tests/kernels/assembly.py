"""Reading a kernel's assembly: a text becomes blocks of events, joined by branches.

Presence alone proves nothing, and neither does the order in the text: the blocks of a loop stand
anywhere. ``paths`` follows the branches.
"""

import functools
import re
from dataclasses import dataclass

Event = tuple[str, int]  # its kind, its line


@dataclass(frozen=True)
class Dialect:
    """How an assembly is read.

    events: (kind, pattern) in order of preference. skips: branches past code that only some threads
    execute; the thread that is followed executes it where it is a straight piece.
    """

    label: str
    jump: str
    branch: str
    end: str
    skips: str
    events: tuple[tuple[str, str], ...]

    @functools.cached_property
    def _any(self) -> re.Pattern[str]:
        return re.compile("|".join(pattern for _, pattern in self.events))

    def kind(self, line: str) -> str | None:
        if line.startswith("\t.") or not self._any.search(line):
            return None
        return next(kind for kind, pattern in self.events if re.search(pattern, line))


PTX = Dialect(
    label=r"^(\$L__BB\w+):",
    jump=r"^\s*bra(?:\.uni)?\s+(\$L\w+)",
    branch=r"^\s*@!?%p\d+\s+bra(?:\.uni)?\s+(\$L\w+)",
    end=r"^\s*(?:ret|exit);",
    skips=r"$^",
    events=(
        ("publish", r"\bst\.release\.sys"),
        ("tell", r"\batom\.global\.sys\.release"),
        ("poll", r"\bld\.acquire\.sys"),
        ("barrier", r"\bbar(?:rier)?\.(?:cta\.)?sync"),
        ("volatile", r"\bld\.volatile\.global\.v[24]\.b(?:32|64)"),
        ("pulled", r"\bld\.global\.cg\.(?:v4\.b32|v2\.b64)"),
        ("given", r"\bld\.global\.(?:v4\.b32|v2\.b64)"),
        ("vector", r"\bst\.global\.(?:v4\.b32|v2\.b64)"),
        ("word", r"\bst\.global\.[bu]32\b"),
        ("long", r"\bst\.global\.[bu]64\b"),
    ),
)
_AMD = {
    "label": r"^(\.LBB\w+):",
    "jump": r"^\s*s_branch\s+(\.LBB\w+)",
    "branch": r"^\s*s_cbranch_\w+\s+(\.LBB\w+)",
    "end": r"^\s*s_endpgm",
    "skips": r"^\s*s_cbranch_execz",
}
GFX9 = Dialect(
    **_AMD,
    events=(
        ("tell", r"\bglobal_atomic_swap\b.*\boffset:4 sc1\b"),
        ("publish", r"\bglobal_atomic_swap\b.*\bsc1\b"),
        ("poll", r"\bglobal_(?:load_dword|atomic_add)\b.*\bsc1\b"),
        ("invalidate", r"\bbuffer_inv sc0 sc1"),
        ("write-back", r"\bbuffer_wbl2 sc0 sc1"),
        ("drained", r"\bs_waitcnt vmcnt\(0\)"),
        ("barrier", r"\bs_barrier\b"),
        ("pulled", r"\bglobal_load_dwordx4\b.*\bnt\b"),
        ("given", r"\b(?:global|buffer|flat)_load_(?:lds_)?dwordx4\b"),
        ("vector", r"\b(?:global|buffer|flat)_store_dwordx4\b"),
        ("word", r"\b(?:global|buffer|flat)_store_dword\b"),
        ("long", r"\b(?:global|buffer|flat)_store_dwordx2\b"),
    ),
)
GFX12 = Dialect(
    **_AMD,
    events=(
        ("tell", r"\bglobal_atomic_swap_b32\b.*\boffset:4 scope:SCOPE_SYS"),
        ("publish", r"\bglobal_atomic_swap_b32\b.*\bscope:SCOPE_SYS"),
        ("poll", r"\bglobal_(?:load_b32|atomic_add_u32)\b.*\bscope:SCOPE_SYS"),
        ("invalidate", r"\bglobal_inv scope:SCOPE_SYS"),
        ("write-back", r"\bglobal_wb scope:SCOPE_SYS"),
        ("drained", r"\bs_wait_(?:storecnt|storecnt_dscnt) 0x0"),
        ("loaded", r"\bs_wait_(?:loadcnt|loadcnt_dscnt) 0x0"),
        ("barrier", r"\bs_barrier_wait\b"),
        ("pulled", r"\bglobal_load_b128\b.*\bTH_LOAD_NT\b"),
        ("given", r"\b(?:global|buffer|flat)_load_b128\b"),
        ("vector", r"\b(?:global|buffer|flat)_store_b128\b"),
        ("word", r"\b(?:global|buffer|flat)_store_b32\b"),
        ("long", r"\b(?:global|buffer|flat)_store_b64\b"),
    ),
)


@dataclass(frozen=True)
class Block:
    """successors: labels, and whether the branch skips a wait (only threads without a lane, or of
    a rank that has failed, take it).
    """

    events: tuple[Event, ...]
    successors: tuple[tuple[str, bool], ...]


def blocks(text: str, dialect: Dialect) -> dict[str, Block]:
    """By label; the first is "start"."""
    found: dict[str, Block] = {}
    lines = text.splitlines()
    events = _events(lines, dialect)
    place = {m[1]: n for n, line in enumerate(lines) if (m := re.match(dialect.label, line))}
    name, begin, successors, open_end = "start", 0, [], True

    def close(number: int) -> None:
        here = tuple((events[n], n) for n in range(begin, number) if n in events)
        found[name] = Block(here, tuple(successors))

    for number, line in enumerate(lines):
        if match := re.match(dialect.label, line):
            if open_end:
                successors.append((match[1], False))
            close(number)
            name, begin, successors, open_end = match[1], number, [], True
        elif open_end and (match := re.match(dialect.branch, line)):
            skipped = range(number, place[match[1]]) if re.match(dialect.skips, line) else range(0)
            if not skipped or any(number < n < place[match[1]] for n in place.values()):
                waits = any(events.get(n) == "poll" for n in skipped)
                successors.append((match[1], waits))
            successors.append((f"{name}+{number}", False))
            close(number)
            name, begin, successors = f"{name}+{number}", number, []
        elif open_end and (match := re.match(dialect.jump, line)):
            successors.append((match[1], False))
            open_end = False
        elif open_end and re.match(dialect.end, line):
            open_end = False
    close(len(lines))
    return found


def _events(lines: list[str], dialect: Dialect) -> dict[int, str]:
    """By line. What looks like a poll is one only if it acquires: on AMD GPUs if an invalidation
    follows; without one the host's page is read.
    """
    found = {n: kind for n, line in enumerate(lines) if (kind := dialect.kind(line))}
    if "invalidate" in dict(dialect.events):
        acquires = False
        for number in sorted(found, reverse=True):
            kind = found[number]
            if kind == "poll" and not acquires:
                del found[number]
            acquires = kind == "invalidate" or (acquires and kind in ("drained", "loaded"))
    return found


def without(text: str, dialect: Dialect, kind: str) -> str:
    """The text without the lines of one kind of event: what a check must reject."""
    return "\n".join(line for line in text.splitlines() if dialect.kind(line) != kind)
