"""PyTorch's own distributed suite, which ships in its wheel, run on any registered backend.

    python tests/ranks/torch_suite.py --backend r4d -w 3 [name ...]

Prints one line of JSON per test (test, status, seconds, message) and, last, the counts; exits 1
when a test failed or its process died (status LOST). The suite knows backends by name, so here the
backend also answers to the names in ACTS_AS wherever the suite compares names.
"""

import argparse
import importlib.util
import json
import os
import sys
import tempfile
import time
import unittest
from collections import Counter
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

SUITE = "torch.testing._internal.distributed.distributed_test"
BACKEND_LINE = 'BACKEND = os.environ["BACKEND"]\n'
ACTS_AS = ("gloo", "mpi")
TEST_TIMEOUT_S = 30


class Alias(str):
    """The backend's own name when printed or passed on; equal to every name in ACTS_AS too."""

    def __eq__(self, other: object) -> bool:
        return other in ACTS_AS or str.__eq__(self, str(other))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(ACTS_AS[0])


def load(backend: str) -> type[unittest.TestCase]:
    import torch
    import torch.testing._internal.common_distributed as common

    torch.set_num_threads(1)
    common.TIMEOUT_DEFAULT = TEST_TIMEOUT_S
    common.TIMEOUT_OVERRIDE.clear()
    for supported in common.DistTestCases.backend_feature.values():
        supported.add(backend)
    if int(os.environ["WORLD_SIZE"]) >= 3:  # the subgroup tests ask for 8 ranks; 3 are enough
        common.skip_if_small_worldsize = lambda test: test
    suite = edited_suite(backend)

    class TorchSuite(suite.TestDistBackend, suite.DistributedTest._DistTestBase):  # type: ignore
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(get_context("fork").Process)

    return TorchSuite


def edited_suite(backend: str) -> ModuleType:
    spec = importlib.util.find_spec(SUITE)
    assert spec is not None
    source = Path(str(spec.origin)).read_text()
    assert source.count(BACKEND_LINE) == 1, f"{SUITE} sets BACKEND in another way now"
    os.environ["BACKEND"] = backend
    module = importlib.util.module_from_spec(spec)
    module.__dict__["Alias"] = Alias
    sys.modules[SUITE] = module
    edited = source.replace(BACKEND_LINE, 'BACKEND = Alias(os.environ["BACKEND"])\n')
    exec(compile(edited, str(spec.origin), "exec"), module.__dict__)
    return module


class Record(unittest.TestResult):
    """Appends a line per finished test, so that what ran before a crash is kept."""

    def __init__(self, file: TextIO) -> None:
        super().__init__()
        self.file = file
        self.started = 0.0

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self.started = time.monotonic()

    def write(self, test: unittest.TestCase, status: str, message: str = "") -> None:
        seconds = round(time.monotonic() - self.started, 2)
        name = test.id().rpartition(".")[2]
        line = {"test": name, "status": status, "seconds": seconds, "message": message[-3000:]}
        print(json.dumps(line), file=self.file)

    def addSuccess(self, test: unittest.TestCase) -> None:
        self.write(test, "PASS")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self.write(test, "SKIP", reason)

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        self.write(test, "FAIL", self._exc_info_to_string(err, test))

    addFailure = addError


def run_share(cases: type[unittest.TestCase], names: list[str], path: str) -> None:
    os.dup2(2, 1)  # what the tests print shall not mix with the records
    with open(path, "w", buffering=1) as file:
        record = Record(file)
        for name in names:
            unittest.TestSuite([cases(name)]).run(record)


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Deals the tests to `shards` processes and gathers their records."""
    cases = load(options.backend)
    names = options.names or unittest.TestLoader().getTestCaseNames(cases)
    with tempfile.TemporaryDirectory(prefix="torch-suite-") as folder:
        paths = [os.path.join(folder, str(shard)) for shard in range(options.shards)]
        shares = [
            get_context("fork").Process(
                target=run_share, args=(cases, names[shard :: options.shards], path)
            )
            for shard, path in enumerate(paths)
        ]
        for path in paths:
            Path(path).touch()
        for share in shares:
            share.start()
        for share in shares:
            share.join()
        lines = [line for path in paths for line in Path(path).read_text().splitlines()]
    records = [json.loads(line) for line in lines]
    lost = set(names) - {record["test"] for record in records}
    return records + [{"test": name, "status": "LOST", "message": ""} for name in sorted(lost)]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", default="r4d")
    parser.add_argument("-w", "--world-size", type=int, default=3)
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    os.environ["WORLD_SIZE"] = str(options.world_size)
    for name, value in (
        ("OMP_NUM_THREADS", "1"),
        ("GLOO_SOCKET_IFNAME", "lo"),
        ("MASTER_ADDR", "127.0.0.1"),
    ):
        os.environ.setdefault(name, value)
    records = run(options)
    for record in sorted(records, key=lambda record: record["test"]):
        print(json.dumps(record))
    counts = Counter(record["status"] for record in records)
    print(json.dumps(counts))
    return int(bool(counts["FAIL"] or counts["LOST"]))


if __name__ == "__main__":
    sys.exit(main())
