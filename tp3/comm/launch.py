"""Start ranks as processes of this machine and collect what they return (tests, smoke, benchmarks).

Contract: `launch` returns the ranks' results in rank order or raises one exception, and leaves no
process behind. The rank that failed first, by the clock all processes share, is the one reported.
Ranks meet in a fresh file, never on a fixed port.
"""

import faulthandler
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any, Literal

STARTUP_S = 30.0  # importing torch in many processes at once, on top of the caller's timeout
GRACE_S = 5.0  # for the other ranks once one has failed
EXIT_S = 20.0  # for all ranks to exit once they have returned
POLL_S = 0.1
DYING_S = 0.5  # how long peers may know of a death before it shows


class RankFailure(RuntimeError):
    """A rank raised, died or did not finish; `rank` is the first that did."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"rank {rank} {reason}")
        self.rank = rank


@dataclass(frozen=True)
class Outcome:
    """How a rank ended; `time` is on the monotonic clock, which Linux shares among processes."""

    time: float
    result: Any = None
    failure: str | None = None
    died: bool = False


@dataclass(frozen=True)
class Group:
    """What every rank needs to know to join."""

    world_size: int
    backend: str
    folder: Path
    timeout: float
    init: bool
    device: str


def launch(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    backend: str = "r4d",
    start: Literal["fork", "spawn"] = "fork",
    device: Literal["cpu", "cuda"] = "cpu",
    timeout: float = 60.0,
    env: Mapping[str, str] | None = None,
    init: bool = True,
    expect_dead: Collection[int] = (),
) -> list[Any]:
    """`[function(rank, world_size, *args) for rank in range(world_size)]`, each in its own process.

    start: "fork" is quick when torch is already imported here; "spawn" is a must once CUDA is used.
    device: "cuda" makes GPU `rank % device_count` the rank's current one before it joins the group.
    timeout: seconds, of the process group and, plus STARTUP_S, of the whole launch.
    env: set in every rank before torch is imported, beside RANK, LOCAL_RANK and WORLD_SIZE.
    init: initialise the default process group before the function and destroy it afterwards.
    expect_dead: ranks that must die without returning; their result is None.
    """
    if world_size < 1:
        raise ValueError(f"world_size is {world_size}; it must be at least 1")
    if start not in ("fork", "spawn"):
        raise ValueError(f"start is {start!r}; it must be 'fork' or 'spawn'")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device is {device!r}; it must be 'cpu' or 'cuda'")
    context: Any = get_context(start)
    processes: list[Any] = []
    pipes: list[connection.Connection] = []
    with tempfile.TemporaryDirectory(prefix="tp3-launch-") as folder:
        group = Group(world_size, backend, Path(folder), timeout, init, device)
        try:
            for rank in range(world_size):
                pipe, far_end = context.Pipe(duplex=False)
                pipes.append(pipe)
                process = context.Process(
                    target=_rank_main, args=(function, rank, args, group, far_end)
                )
                ids = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size}
                with _environment({**{k: str(v) for k, v in ids.items()}, **(env or {})}):
                    process.start()
                processes.append(process)
                far_end.close()
            outcomes = _collect(processes, pipes, group, frozenset(expect_dead))
            _check_exits(processes, outcomes)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
                process.close()
            for pipe in pipes:
                pipe.close()
    return [outcomes[rank].result for rank in range(world_size)]


@contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _rank_main(
    function: Callable[..., Any],
    rank: int,
    args: tuple[Any, ...],
    group: Group,
    pipe: connection.Connection,
) -> None:
    _die_with_parent()
    with open(group.folder / f"stack{rank}", "w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack)
        try:
            result = _in_group(function, rank, args, group)
            message = pickle.dumps(Outcome(time.monotonic(), result))
        except BaseException:
            message = pickle.dumps(Outcome(time.monotonic(), failure=traceback.format_exc()))
        faulthandler.unregister(signal.SIGUSR1)
    pipe.send_bytes(message)
    pipe.close()


def _die_with_parent() -> None:
    import ctypes

    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _in_group(function: Callable[..., Any], rank: int, args: tuple[Any, ...], group: Group) -> Any:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if group.device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    if group.init:
        dist.init_process_group(
            group.backend,
            init_method=f"file://{group.folder / 'rendezvous'}",
            rank=rank,
            world_size=group.world_size,
            timeout=timedelta(seconds=group.timeout),
        )
    result = function(rank, group.world_size, *args)
    if group.init and dist.is_initialized():
        dist.destroy_process_group()
    return result


def _collect(
    processes: list[Any],
    pipes: list[connection.Connection],
    group: Group,
    expect_dead: frozenset[int],
) -> dict[int, Outcome]:
    outcomes: dict[int, Outcome] = {}
    pending = set(range(group.world_size))
    last_seen = time.monotonic()
    deadline = last_seen + group.timeout + STARTUP_S
    while pending and (now := time.monotonic()) < deadline:
        for rank in sorted(pending):
            alive = processes[rank].is_alive()
            if pipes[rank].poll():
                with suppress(EOFError):
                    outcomes[rank] = pickle.loads(pipes[rank].recv_bytes())
            if rank not in outcomes and not alive:
                # When it died is not known. It was alive when last seen, perhaps half dead then:
                # sockets close before the process can be waited for.
                how = _how_it_died(processes[rank].exitcode)
                failure = None if rank in expect_dead else how
                outcomes[rank] = Outcome(last_seen - DYING_S, failure=failure, died=True)
            elif rank in outcomes and rank in expect_dead and not outcomes[rank].failure:
                failure = "returned, but was expected to die"
                outcomes[rank] = Outcome(outcomes[rank].time, failure=failure)
            if rank in outcomes:
                pending.remove(rank)
                if outcomes[rank].failure:
                    deadline = min(deadline, now + GRACE_S)
        last_seen = now
        waiting = [pipes[rank] for rank in pending] + [processes[rank].sentinel for rank in pending]
        connection.wait(waiting, POLL_S)
    failures = sorted((o.time, rank) for rank, o in outcomes.items() if o.failure)
    if failures:
        rank = failures[0][1]
        raise RankFailure(rank, _story(rank, outcomes, pending))
    if pending:
        stacks = _stacks(processes, group.folder, pending)
        names = ", ".join(map(str, sorted(pending)))
        reason = f"did not finish in {group.timeout + STARTUP_S:g} s (all unfinished: {names})"
        raise RankFailure(min(pending), reason + stacks)
    return outcomes


def _how_it_died(exitcode: int) -> str:
    if exitcode < 0:
        return f"was killed by signal {-exitcode} ({signal.Signals(-exitcode).name})"
    return f"exited with code {exitcode} and no result"


def _story(first: int, outcomes: dict[int, Outcome], pending: set[int]) -> str:
    reason = str(outcomes[first].failure)
    lines = [f"raised:\n{reason}" if reason.startswith("Traceback") else reason]
    for rank, outcome in sorted(outcomes.items()):
        if outcome.failure and rank != first:
            lines.append(f"then rank {rank}: {outcome.failure.strip().splitlines()[-1]}")
    if pending:
        lines.append(f"still running {GRACE_S:g} s later: {', '.join(map(str, sorted(pending)))}")
    return "\n".join(lines)


def _stacks(processes: list[Any], folder: Path, ranks: set[int]) -> str:
    for rank in ranks:
        # The file exists once the rank listens; before that the signal would kill it.
        if (folder / f"stack{rank}").exists():
            os.kill(processes[rank].pid, signal.SIGUSR1)
    time.sleep(2 * POLL_S)
    texts = {rank: folder / f"stack{rank}" for rank in sorted(ranks)}
    return "".join(f"\nrank {r}:\n{t.read_text()}" for r, t in texts.items() if t.exists())


def _check_exits(processes: list[Any], outcomes: dict[int, Outcome]) -> None:
    deadline = time.monotonic() + EXIT_S
    for rank, process in enumerate(processes):
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            raise RankFailure(rank, f"returned, but did not exit within {EXIT_S:g} s")
        if process.exitcode != 0 and not outcomes[rank].died:
            raise RankFailure(rank, f"returned, then {_how_it_died(process.exitcode)}")
