"""A process that imports vLLM once and forks for what it is asked: importing it takes longer than a
tiny model does.

Each line of stdin is a request of ``fleet.ask``: the number of ranks, what is set in their
environment, the folder of their logs, and a job of ``engine.be`` or code to run. The answer is a
line: which rank failed first, or null. It ends with its stdin.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from tests.vllm import engine


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # some versions of vLLM log to stdout
    import vllm.entrypoints.llm
    import vllm.v1.worker.cpu_worker  # noqa: F401

    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        print(json.dumps(serve(json.loads(line))), file=answers, flush=True)
    os._exit(0)  # before extension modules complain of what they leaked


def serve(request: dict[str, Any]) -> int | None:
    """Fork the ranks and wait for all; when one fails the others are ended."""
    ranks = {fork(request, rank): rank for rank in range(request["ranks"])}
    failed = None
    while ranks:
        child, status = os.wait()
        rank = ranks.pop(child)
        if status and failed is None:
            failed = rank
            for other in ranks:
                os.kill(other, signal.SIGKILL)
    return failed


def fork(request: dict[str, Any], rank: int) -> int:
    """The process of one rank, which never returns from here."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        log = Path(request["folder"]) / f"rank{rank}.log"
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for stream in (1, 2):
            os.dup2(os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_APPEND), stream)
        os.environ.update(request["env"])
        engine.hasten()
        if "code" in request:
            exec(request["code"], {"__name__": "__main__"})
        else:
            engine.be(rank, request["job"], Path(request["folder"]))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
