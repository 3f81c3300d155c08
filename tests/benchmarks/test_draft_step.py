"""The benchmark of growth steps without a GPU."""

import json
from pathlib import Path

import pytest
from benchmarks.draft_bench import command, drive
from benchmarks.draft_bench.drive import Point
from benchmarks.draft_bench.models import idle_growth
from benchmarks.draft_bench.parts import host_parts


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drive, "_CONTEXT", 60)
    # The collector's settings are the process's own.
    monkeypatch.setattr(drive, "spare_collector", lambda: None)
    monkeypatch.setattr("benchmarks.draft_bench.parts.spare_collector", lambda: None)


def test_the_period_is_that_of_steps_as_wide_as_was_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "figures.json"
    arguments = ["--only", "host", "--points", "3x12", "--steps", "30", "--json", str(file)]
    assert command.run(arguments) == 0
    (row,) = json.loads(file.read_text())
    assert (row["sessions"], row["width"]) == (3, 12)
    assert 0 < row["period"] <= row["high"]
    assert row["forward"] > 0
    assert row["commit"] > 0
    assert 5 < row["steps"] <= 30
    assert "host alone" in capsys.readouterr().out


def test_every_part_of_a_step_is_timed():
    point = Point(sessions=2, width=6)
    with idle_growth(point) as growth:
        found = host_parts(growth, point, steps=20)
    assert set(found) == {"plan", "stage", "collect", "add", "commit", "hand out"}
    assert all(value > 0 for value in found.values())
