"""How the ranks of a new group meet: over the store, each stage voted.

1. Every rank posts who it is (process, memory, settings); everyone checks everyone's settings.
2. On each host the lowest rank creates the segment and posts its name, or why it could not.
3. Every rank attaches and votes. One "no" makes all ranks raise with that rank's reason.
"""

from __future__ import annotations

import json
import mmap
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, TypeVar

from torch._C._distributed_c10d import Store

from tp3.comm.errors import R4DError
from tp3.comm.layout import HostLayout
from tp3.comm.settings import Settings
from tp3.comm.transport import segment
from tp3.comm.transport.liveness import ProcessHandle, pid_namespace

Joined = TypeVar("Joined")
POLL_SECONDS = 1e-3


@dataclass(frozen=True)
class Member:
    """What a rank tells the others about itself."""

    process: ProcessHandle
    memory: str
    pids: str
    settings: Settings

    @classmethod
    def own(cls) -> Member:
        return cls(
            ProcessHandle.own(), segment.memory_identity(), pid_namespace(), Settings.from_env()
        )

    def pack(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def unpack(cls, data: bytes) -> Member:
        record: dict[str, Any] = json.loads(data)
        return cls(
            ProcessHandle(**record["process"]),
            record["memory"],
            record["pids"],
            Settings(**record["settings"]),
        )


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """A store as the ranks of one group use it while they meet.

    check: raises when it is of no use to wait any longer, once there is a way to tell.
    """

    store: Store
    rank: int
    world_size: int
    timeout: timedelta
    check: Callable[[], None] | None = None

    def exchange(self, stage: str, mine: bytes) -> list[bytes]:
        """Everybody's bytes in rank order; R4DError names the ranks that did not come in time."""
        self.store.set(f"{stage}/{self.rank}", mine.decode())
        return [self.read(stage, rank) for rank in range(self.world_size)]

    def read(self, stage: str, rank: int) -> bytes:
        key = f"{stage}/{rank}"
        try:
            self._wait(key)
        except R4DError:
            raise
        except (RuntimeError, TimeoutError) as error:
            missing = [r for r in range(self.world_size) if not self.store.check([f"{stage}/{r}"])]
            raise R4DError(
                f"r4d: rank(s) {missing or [rank]} of {self.world_size} did not reach stage "
                f"'{stage}' of the group's creation within {self.timeout.total_seconds():g} s"
            ) from error
        return bytes(self.store.get(key))

    def _wait(self, key: str) -> None:
        if self.check is None:
            self.store.wait([key], self.timeout)
            return
        deadline = time.monotonic() + self.timeout.total_seconds()
        while not self.store.check([key]):
            self.check()
            if time.monotonic() > deadline:
                raise TimeoutError
            time.sleep(POLL_SECONDS)

    def vote(self, stage: str, step: Callable[[], Any]) -> Any:
        """Run ``step`` on every rank; its result, or R4DError on all ranks with the first failing
        rank's reason.
        """
        result, reason = None, ""
        try:
            result = step()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        for rank, answer in enumerate(self.exchange(stage, reason.encode())):
            if answer:
                raise R4DError(f"r4d: rank {rank} could not create the group: {answer.decode()}")
        return result


def introduce(meeting: Meeting) -> list[Member]:
    """All members in rank order, their settings equal.

    R4DError on every rank names the rank that could not introduce itself, or the setting that
    differs.
    """
    own = meeting.vote("settings", Member.own)
    members = [Member.unpack(data) for data in meeting.exchange("member", own.pack())]
    for rank, member in enumerate(members):
        difference = own.settings.difference(member.settings)
        if difference:
            raise R4DError(
                f"r4d: rank {meeting.rank} (here) and rank {rank} (there) differ: {difference}; "
                "set it alike on all ranks"
            )
    return members


def share(
    meeting: Meeting,
    local_ranks: tuple[int, ...],
    layout: HostLayout,
    join: Callable[[mmap.mmap], Joined],
) -> Joined:
    """``join`` of the segment that ``local_ranks`` share: created, attached by all, and without a
    name on return.

    ``join`` runs before the last vote, so what it writes (a rank's first flag) is there before any
    rank goes on.
    """
    if len(local_ranks) == 1:
        meeting.vote("create", lambda: None)
        joined: Joined = meeting.vote("attach", lambda: join(mmap.mmap(-1, layout.total_bytes)))
        return joined
    leader = local_ranks[0]
    names: list[str] = []

    def create() -> None:
        if meeting.rank == leader:
            names.append(segment.create(layout.total_bytes))
            meeting.store.set(f"segment/{leader}", names[0])

    def attach() -> Joined:
        name = meeting.read("segment", leader).decode()
        return join(segment.attach(name, layout.total_bytes))

    try:
        meeting.vote("create", create)
        joined = meeting.vote("attach", attach)
        return joined
    finally:
        for name in names:
            segment.unlink(name)
