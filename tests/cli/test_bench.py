"""`tp3 bench allreduce` on CPU ranks: what it prints and writes, and what it refuses."""

import json

import pytest
from click.testing import CliRunner

from tp3.bench import peers
from tp3.cli.main import main

SMALL = ("--device", "cpu", "--world-size", "2", "--kib", "8", "--repeats", "3")


def allreduce(*arguments):
    return CliRunner().invoke(main, ("bench", "allreduce", *arguments))


def test_files_name_both_peers(tmp_path):
    result = allreduce(*SMALL, "--write", "some-cpu", "--out", str(tmp_path / "new"))
    assert result.exit_code == 0, result.output
    stem = next((tmp_path / "new").glob("allreduce_some-cpu_*.md")).with_suffix("")
    text = stem.with_suffix(".md").read_text()
    assert "| KiB | r4d | gloo | r4d/gloo |\n" in text
    assert "\n| 8 | " in text
    record = json.loads(stem.with_suffix(".json").read_text())
    assert {"tp3", "torch", "triton"} <= set(record["versions"])
    (row,) = record["rows"]
    assert (row["mode"], row["nbytes"]) == ("eager", 8192)
    assert {name: len(ranks) for name, ranks in row["ranks_us"].items()} == {"r4d": 2, "gloo": 2}
    assert all(0 < q["low"] <= q["median"] <= q["high"] for q in row["us"].values())


def test_json_goes_to_stdout_alone():
    result = allreduce(*SMALL, "--kib", "80, 8", "--dtype", "float16", "--json")
    record = json.loads(result.stdout)
    assert [row["nbytes"] for row in record["rows"]] == [8192, 81920]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--world-size", "1"), ("1", "2..16")),
        (("--device", "tpu"), ("tpu", "cuda, cpu")),
        (("--dtype", "int8"), ("int8", "bfloat16, float16, float32")),
        (("--kib", "8,x"), ("'x'", "whole number")),
        (("--kib", "0"), ("0 KiB", "1..1048576")),
        (("--kib", ","), ("no sizes",)),
        (("--mode", "graph"), ("'graph'", "cpu: eager")),
        (("--repeats", "2"), ("2", "3..1000")),
        (("--timeout", "0"), ("0 s", "positive")),
        (("--write", "a/b"), ("'a/b'", "letters")),
    ],
    ids=lambda value: "".join(value) if value[0].startswith("--") else "",
)
def test_bad_options_are_one_sentence(arguments, words):
    result = allreduce(*SMALL, *arguments)
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert all(word in result.stderr for word in words), result.stderr


def test_a_wrong_sum_stops_it(monkeypatch, tmp_path):
    """Negative control: r4d off by one in one element, on one rank."""

    def off(rank, room):
        (right,) = r4d(rank, room)

        def reduce(x):
            right.reduce(x)
            x[5] += rank.rank
            return x

        return [peers.Peer("r4d", reduce, room, exact=True)]

    r4d = peers.r4d
    monkeypatch.setattr(peers, "r4d", off)
    result = allreduce(*SMALL, "--write", "none", "--out", str(tmp_path))
    assert result.exit_code == 1
    assert "r4d, 8 KiB of bfloat16, eager: rank 1 element 5: got" in result.stderr
    assert not list(tmp_path.iterdir())
