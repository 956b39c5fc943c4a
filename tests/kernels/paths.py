"""What must come before what on every path through a kernel's assembly.

The paths are those of a thread with work to do: it does not go past a wait that it has not begun,
as only threads without a lane and ranks that have failed do.
"""

from dataclasses import dataclass
from typing import NamedTuple

from tests.kernels.assembly import Dialect, blocks


class State(NamedTuple):
    """How many of ``Order.then`` have come, and whether this thread has polled since it last pushed
    or published.
    """

    progress: int
    polled: bool


@dataclass(frozen=True)
class Order:
    """After ``first`` (and at the start if ``from_start``) ``then`` in this order before ``last``.

    renewed_by: the first of ``then`` if all others have to come anew when it comes again.
    """

    first: str
    then: tuple[str, ...]
    last: str
    renewed_by: str = ""
    from_start: bool = False

    @property
    def start(self) -> State:
        return State(0 if self.from_start else len(self.then), False)

    def step(self, state: State, kind: str) -> tuple[State, bool]:
        """The next state, and whether the event comes too early."""
        progress, polled = state
        polled = kind == "poll" or (polled and kind not in ("publish", "vector"))
        early = kind == self.last and progress < len(self.then)
        if kind == self.first:
            progress = 0
        elif progress and kind == self.renewed_by:
            progress = 1
        elif progress < len(self.then) and kind == self.then[progress]:
            progress += 1
        return State(progress, polled), early


def violations(text: str, dialect: Dialect, order: Order) -> list[int]:
    """Lines (from 1) where ``order.last`` may come too early. AssertionError if no path has both
    ends of the order: then nothing was checked.
    """
    graph = blocks(text, dialect)
    todo, seen, met, wrong = [("start", order.start)], set(), set(), set()
    while todo:
        name, state = todo.pop()
        if (name, state) in seen:
            continue
        seen.add((name, state))
        for kind, line in graph[name].events:
            met.add(kind)
            state, early = order.step(state, kind)
            if early:
                wrong.add(line + 1)
        todo += [
            (label, state) for label, waits in graph[name].successors if state.polled or not waits
        ]
    missing = {order.first, order.last} - met
    assert not missing, f"no path has {missing}"
    return sorted(wrong)
