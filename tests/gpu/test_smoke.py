"""`tp3 smoke` on the GPUs at hand: three ranks, with an MPS daemon of its own and without."""

import json
import os
import shutil
import subprocess
import sys
import tempfile

import pytest
import torch
import torch.distributed as dist

from tp3.comm.launch import launch
from tp3.smoke import repeats
from tp3.smoke.mps import CONTROL
from tp3.smoke.repeats import NBYTES, Effort
from tp3.smoke.terms import num_different, ordered_sum, terms

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a GPU"),
    pytest.mark.timeout(900),
]

needs_mps = pytest.mark.skipif(shutil.which(CONTROL) is None, reason=f"needs {CONTROL}")

# In a process of its own, which must not open a GPU itself.
PROGRAM = """
import torch
from tp3.cli.main import main
try:
    main()
finally:
    assert not torch.cuda.is_initialized()
"""


@pytest.mark.parametrize(
    "options",
    [["--device", "cuda"], pytest.param(["--mps"], marks=needs_mps)],
    ids=["sliced", "mps"],
)
def test_three_ranks(options):
    with tempfile.TemporaryDirectory() as folder:  # short: sockets of MPS lie in it
        checked(options, folder)


def checked(options, folder):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "smoke", "--json", *options],
        capture_output=True,
        text=True,
        env={**os.environ, "TMPDIR": folder},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(done.stdout)
    assert (record["device"], record["ok"]) == ("cuda", True)
    assert (record["num_gpus"], record["mps"]) == (torch.cuda.device_count(), "--mps" in options)
    details = {row["check"]: row["detail"] for row in record["rows"]}
    for size in ("8 KiB", "80 KiB", "256 KiB", "512 KiB", "1024 KiB"):
        eager, graph = (
            details[f"{mode} all_reduce bfloat16 {size}"] for mode in ("eager", "graph")
        )
        assert eager.startswith("60 calls, 0 mismatches")
        assert graph.startswith("20 replays of 3 calls, 0 mismatches")
    assert not [name for name in os.listdir(folder) if name.startswith("tp3-")]


def test_terms_and_sums_are_those_of_the_cpu():
    there = terms(5, 3, 1 << 16, device="cuda")
    here = terms(5, 3, 1 << 16)
    assert [num_different(a.cpu(), b) for a, b in zip(there, here, strict=True)] == [0] * 5
    assert num_different(ordered_sum(there).cpu(), ordered_sum(here)) == 0


def with_another_order(rank, world_size):
    def all_reduce(x):
        parts = [torch.empty_like(x) for _ in range(world_size)]
        dist.all_gather(parts, x)
        x.copy_(ordered_sum(parts[rank:] + parts[:rank]))

    dist.all_reduce = all_reduce
    return repeats._rank(rank, world_size, "cuda", Effort(10, 0, 3, 1))


def test_another_order_is_counted():
    ranks = launch(with_another_order, 3, start="spawn", device="cuda", timeout=240)
    for rank, result in enumerate(ranks):
        counts = [result["different"]["eager", nbytes] for nbytes in NBYTES]
        assert all((count > 0) == (rank > 0) for count in counts), counts
    assert len({result["digest"] for result in ranks}) == 3
