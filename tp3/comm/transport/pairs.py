"""How two ranks connect: over the store, each step answered before the next one.

Both offer their memory; each maps the other's and says so; each sends a pattern and says how the
other's came. Whoever waits for one pair moves every pair on whose other end has asked, so ranks
whose first messages form a ring do not wait for each other; and nobody goes on while a pair is half
connected, since its other end waits too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator
from contextlib import suppress
from typing import Protocol

from tp3.comm.errors import R4DError
from tp3.comm.layout import peers
from tp3.comm.transport.bootstrap import POLL_SECONDS, Meeting


class Memory(Protocol):
    """What is shared."""

    def refusal(self, peer: int, text: str) -> str:
        """Why the two cannot share memory ("": they can), as both conclude from both offers.

        text: the peer's.
        """

    def map(self, peer: int) -> None:
        """Make the peer's memory reachable. Errors: R4DError."""


class Probe(Protocol):
    """A pattern on its way between two ranks that have mapped each other."""

    def ended(self) -> bool: ...

    def fault(self) -> str:
        """What is wrong with what came ("": nothing); asked once it has ended."""


class Pairs:
    """One rank's pairs. ``wrong``: why no more of them can be tested, "" while they can."""

    def __init__(self, meeting: Meeting, memory: Memory, wrong: Callable[[], str]) -> None:
        self._meeting = meeting
        self._memory = memory
        self._wrong = wrong
        self._peers = peers(meeting.rank, meeting.world_size)
        self._open: dict[int, Generator[None, None, str]] = {}
        self._faults: dict[int, str] = {}  # of pairs that are connected ("") or will never be

    @property
    def connected(self) -> list[int]:
        """Peers that nothing is wrong with."""
        return sorted(peer for peer, fault in list(self._faults.items()) if not fault)

    @property
    def involved(self) -> list[int]:
        """Those, and peers that are being connected. For any thread."""
        return sorted({*self.connected, *list(self._open)})

    def connect(self, ranks: Collection[int], probe: Callable[[int], Probe]) -> None:
        """Connect with ``ranks``, and with whoever has asked meanwhile; probe(peer) starts one.

        Errors: R4DError, on both ends of a pair with the same reason; of several the lowest rank's.
        """
        try:
            self._settle(ranks, probe)
        except BaseException as error:
            self._give_up(ranks, _text(error))
            raise
        for rank in sorted(ranks):
            if self._faults[rank]:
                raise R4DError(f"r4d: {self._faults[rank]}")

    def _settle(self, ranks: Collection[int], probe: Callable[[int], Probe]) -> None:
        deadline = time.monotonic() + self._meeting.timeout.total_seconds()
        while True:
            self._move(ranks, probe)
            if not self._open and all(rank in self._faults for rank in ranks):
                return
            if self._meeting.check is not None:
                self._meeting.check()
            if time.monotonic() > deadline:
                seconds = f"{self._meeting.timeout.total_seconds():g} s"
                self._give_up(ranks, f"the pair was not connected within {seconds}")
                return
            time.sleep(POLL_SECONDS)

    def _give_up(self, ranks: Collection[int], reason: str) -> None:
        """Tell why to whoever is not connected, who finds it when it comes."""
        me = self._meeting.rank
        for peer in {*ranks, *self._open} - set(self._faults):
            told = f"gave up rank {peer}: {reason}"
            self._faults[peer] = f"rank {me}: {told}"
            self._open.pop(peer, None)
            for stage in ("mapped", "probed"):
                with suppress(RuntimeError):  # the store went first
                    self._meeting.store.set(f"device/{stage}/{me}/{peer}", told)

    def _move(self, ranks: Collection[int], probe: Callable[[int], Probe]) -> None:
        """Move every pair on as far as it goes."""
        for peer in self._peers:
            if peer in self._faults:
                continue
            if peer not in self._open:
                if peer not in ranks and not self._there("mapped", peer):
                    continue
                self._open[peer] = self._steps(peer, probe)
            try:
                next(self._open[peer])
            except StopIteration as end:
                self._faults[peer] = end.value
                del self._open[peer]

    def _steps(self, peer: int, probe: Callable[[int], Probe]) -> Generator[None, None, str]:
        """Connect with ``peer``; yields where it would wait, returns what is wrong."""
        while not self._meeting.store.check([f"device/offer/{peer}"]):
            yield
        offer = bytes(self._meeting.store.get(f"device/offer/{peer}")).decode()
        refusal = self._memory.refusal(peer, offer)
        if refusal:
            return refusal
        fault = yield from self._answer("mapped", peer, self._mapped(peer))
        if not fault:
            mine = yield from self._probed(peer, probe)
            fault = yield from self._answer("probed", peer, mine)
        return fault

    def _mapped(self, peer: int) -> str:
        wrong = self._wrong()
        if wrong:
            return f"an earlier self-test failed: {wrong}"
        try:
            self._memory.map(peer)
        except Exception as error:
            return _text(error)
        return ""

    def _probed(self, peer: int, probe: Callable[[int], Probe]) -> Generator[None, None, str]:
        try:
            started = probe(peer)
            while not started.ended():
                yield
            return started.fault()
        except Exception as error:
            return _text(error)

    def _answer(self, stage: str, peer: int, mine: str) -> Generator[None, None, str]:
        """Say what is wrong here and hear what is wrong there; the same text on both ends."""
        me, store = self._meeting.rank, self._meeting.store
        store.set(f"device/{stage}/{me}/{peer}", mine)
        while not self._there(stage, peer):
            yield
        theirs = bytes(store.get(f"device/{stage}/{peer}/{me}")).decode()
        answers = sorted([(me, mine), (peer, theirs)])
        return next((f"rank {rank}: {reason}" for rank, reason in answers if reason), "")

    def _there(self, stage: str, peer: int) -> bool:
        """Whether the peer has answered this rank."""
        return self._meeting.store.check([f"device/{stage}/{peer}/{self._meeting.rank}"])


def _text(error: BaseException) -> str:
    told = str(error).removeprefix("r4d: ")
    return told if isinstance(error, R4DError) else f"{type(error).__name__}: {told}"
