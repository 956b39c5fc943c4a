"""Groups over several hosts: network namespaces, each with a /dev/shm of its own, stand in for
them.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

RANK = Path(__file__).with_name("host_rank.py")
LAYOUTS = {"2+2": (2, 2), "2+1": (2, 1), "1+1+1": (1, 1, 1), "3+2": (3, 2)}


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


@pytest.fixture
def hosts(request: pytest.FixtureRequest):
    """Namespaces on one bridge; a list of (namespace, address), one per host."""
    if os.geteuid() != 0:
        pytest.fail("network namespaces need root")
    tag = f"t{os.getpid() % 100000}"
    bridge = f"{tag}b"
    made = []
    run("ip", "link", "add", bridge, "type", "bridge")
    run("ip", "link", "set", bridge, "up")
    try:
        for index in range(len(request.param)):
            name, outer = f"{tag}n{index}", f"{tag}v{index}"
            run("ip", "netns", "add", name)
            made.append((name, f"10.231.7.{index + 1}"))
            run("ip", "link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", name)
            run("ip", "link", "set", outer, "master", bridge, "up")
            inside = ("ip", "netns", "exec", name, "ip")
            run(*inside, "addr", "add", f"{made[-1][1]}/24", "dev", "eth0")
            run(*inside, "link", "set", "eth0", "up")
            run(*inside, "link", "set", "lo", "up")
        yield request.param, [name for name, _ in made]
    finally:
        for name, _ in made:
            subprocess.run(("ip", "netns", "del", name), check=False)
        subprocess.run(("ip", "link", "del", bridge), check=False)


@pytest.mark.parametrize("hosts", LAYOUTS.values(), ids=LAYOUTS, indirect=True)
def test_every_collective_between_hosts(hosts, tmp_path):
    counts, names = hosts
    world_size = sum(counts)
    processes, rank = [], 0
    for name, count in zip(names, counts, strict=True):
        ranks = " ".join(str(rank + i) for i in range(count))
        rank += count
        script = (
            "mount -t tmpfs -o size=64m tmpfs /dev/shm && "
            f"for r in {ranks}; do {sys.executable} {RANK} $r {world_size} {tmp_path} & done; wait"
        )
        processes.append(
            subprocess.Popen(
                ("ip", "netns", "exec", name, "unshare", "-m", "sh", "-c", script),
                env={**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    output = "".join(process.communicate(timeout=100)[0] for process in processes)
    results = []
    for r in range(world_size):
        path = tmp_path / f"{r}.json"
        assert path.exists(), f"rank {r} did not finish:\n{output}"
        results.append(json.loads(path.read_text()))
    assert len({json.dumps(result["hashes"]) for result in results}) == 1, (
        "ranks ended with different bits"
    )
    for result in results:
        assert result["errors"] == [], output
        assert result["hosts"] == len(counts)
        assert result["stats"]["all_reduce/hierarchical"] > 0
        assert result["stats"]["all_reduce/delegate"] > 0
