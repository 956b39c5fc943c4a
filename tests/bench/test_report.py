"""Figures, ratios and the files, from seconds that are given."""

import json
from pathlib import Path

import pytest

from tp3.bench.files import write
from tp3.bench.plan import Plan
from tp3.bench.report import Quartiles, Report, losses, markdown, row, table
from tp3.bench.wire import floor_us

# Two ranks, three repeats, seconds. Symmetric two-shot is the faster of the two; r4d loses to it
# and beats NCCL at 8 KiB, and loses to both at 64 MiB, where one-shot is missing.
SMALL = [
    {"r4d": [4e-6, 5e-6, 6e-6], "nccl": [10e-6] * 3, "symm one-shot": [8e-6] * 3}
    | {"symm two-shot": [4e-6] * 3},
    {"r4d": [3e-6, 4e-6, 9e-6], "nccl": [9e-6] * 3, "symm one-shot": [7e-6] * 3}
    | {"symm two-shot": [3e-6] * 3},
]
LARGE = [{"r4d": [300e-6] * 3, "nccl": [240e-6] * 3, "symm two-shot": [200e-6] * 3}] * 2


@pytest.fixture
def report():
    def made(nbytes, seconds):
        floor = floor_us(nbytes, 2, 400.0)
        return row("graph", nbytes, calls=4, floor_us=floor, seconds=seconds)

    return Report(
        date="2026-01-02",
        plan=Plan(2, "cuda", kib=(8, 65536), modes=("graph",)),
        hardware="2 × GPU",
        versions={"tp3": "0"},
        ranks_share_a_gpu=False,
        rates_gbs={"both ways at once": 400.0},
        left_out={"symm one-shot, graph, 65536 KiB": "out of memory"},
        rows=[made(8 << 10, SMALL), made(64 << 20, LARGE)],
    )


def test_the_rank_with_the_largest_median_is_shown(report):
    small = report.rows[0]
    assert small.us["r4d"] == Quartiles(*map(pytest.approx, (4, 5, 6)))
    assert [q.median for q in small.ranks_us["r4d"]] == [pytest.approx(5), pytest.approx(4)]


def test_ratios_are_to_the_faster_of_the_named_peers(report):
    assert report.rows[0].ratios == pytest.approx({"r4d/nccl": 0.5, "r4d/best symm": 1.25})
    assert report.rows[1].ratios == pytest.approx({"r4d/nccl": 1.25, "r4d/best symm": 1.5})


def test_the_wire_floor():
    assert floor_us(4_000_000, 2, 400.0) == pytest.approx(10)
    assert floor_us(3_000_000, 3, 400.0) == pytest.approx(10)
    assert floor_us(1, 2, None) is None


def test_losing_rows_and_missing_peers_stay(report):
    titles, cells = table(report, "graph")
    peers = ["r4d", "nccl", "symm one-shot", "symm two-shot"]
    assert titles == ["KiB", *peers, "r4d/nccl", "r4d/best symm", "wire floor"]
    figures = ["300 (300–300)", "240 (240–240)", "–", "200 (200–200)"]
    assert cells[1] == ["65536", *figures, "1.25", "1.50", "168"]
    assert losses(report, "graph") == "A peer is faster than r4d in 2 of 2 rows (8, 65536 KiB)."
    text = markdown(report)
    assert "| 65536 | 300 (300–300) |" in text
    assert "- Left out: symm one-shot, graph, 65536 KiB: out of memory." in text


def test_files_are_named_by_theme_hardware_and_date(report, tmp_path, monkeypatch):
    monkeypatch.setattr("tp3.bench.files.find_spec", lambda name: None)
    paths = write(report, tmp_path, "2xGPU")
    stem = tmp_path / "allreduce_2xGPU_2026-01-02"
    assert paths == [Path(f"{stem}.md"), Path(f"{stem}.json")]
    record = json.loads(paths[1].read_text())
    assert record["rows"][1]["us"]["r4d"]["median"] == pytest.approx(300)
    assert record["plan"]["dtype"] == "bfloat16"


def test_the_plot(report, tmp_path):
    pytest.importorskip("matplotlib")
    assert write(report, tmp_path, "2xGPU")[2].read_bytes().startswith(b"\x89PNG")
