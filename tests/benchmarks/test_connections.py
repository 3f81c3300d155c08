"""The benchmark of many connections: every miss is told, and a small run of it misses nothing."""

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.connections import main, misses


def row(**changes: Any) -> dict[str, Any]:
    usual = {"door": "gRPC", "connections": 200, "run": 2, "completed": 200, "refused": 0, "failed": 0, "errors": ""}
    return usual | {"rss_most_mib": 100} | changes


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([row(completed=199, refused=1, errors="1 x Overloaded: full")], "1 refused, 0 failed (1 x Overloaded: full)"),
        ([row(completed=199, failed=1, errors="1 x no token came")], "0 refused, 1 failed"),
        ([row(), row(run=3, rss_most_mib=106)], "memory grew by 6.0%"),
    ],
)
def test_every_miss_is_told(rows: list[dict[str, Any]], words: str) -> None:
    (line,) = misses(rows)
    assert words in line


@pytest.mark.parametrize(
    "rows",
    [
        [row(), row(run=3, rss_most_mib=104)],
        [row(run=1), row(rss_most_mib=150)],
        [row(), row(run=1, connections=1000, completed=1000, rss_most_mib=150)],
        [row(), row(run=1, door="HTTP", rss_most_mib=150)],
    ],
)
def test_what_grows_with_its_first_load_is_no_miss(rows: list[dict[str, Any]]) -> None:
    assert misses(rows) == []


def test_a_small_run_serves_everybody_by_both_doors(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    options = ["--connections", "12", "--repeats", "1", "--max-new-tokens", "4", "--output-json", str(file)]
    assert main(options) == 0
    runs = json.loads(file.read_text())["runs"]
    assert [(run["door"], run["completed"], run["refused"], run["failed"]) for run in runs] == [
        ("gRPC", 12, 0, 0),
        ("HTTP", 12, 0, 0),
    ]
    assert all(0 < run["wait_s_median"] <= run["wait_s_p99"] <= run["duration_s"] for run in runs)
    assert all(0 < run["rss_before_mib"] <= run["rss_most_mib"] for run in runs)
