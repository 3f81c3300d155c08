"""The benchmark of a draft worker that serves, without a GPU."""

import json
import random
from pathlib import Path

import pytest
from benchmarks.draft_service_bench import command
from benchmarks.draft_service_bench.coordinator import Load, Session

_SURE = Load(
    sessions=1, prompt_tokens=5, round_ms=1.0, acceptance=1.0, temperature=0.0, live_nodes=64, vocab_size=96
)  # fmt: skip


# A step of the device that stands in takes half a millisecond. Where steps overlap, three of them may be over by the
# time that the first of twenty is noted, if the thread lags behind: there are seventeen left for nineteen periods.
@pytest.mark.parametrize(("begun", "least_ms"), [("1", 0.5), ("2", 0.5 * 17 / 19)])
def test_steps_that_serve_are_measured_beside_bare_ones(
    begun: str, least_ms: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "figures.json"
    arguments = ["--sessions", "2", "--bare-rows", "6", "--bare-steps", "20", "--seconds", "0.5", "--warm-up", "0.2"]
    assert command.run([*arguments, "--steps-begun", begun, "--json", str(file)]) == 0
    (row,) = json.loads(file.read_text())
    assert row["sessions"] == 2
    assert row["bare_ms"] > least_ms
    assert row["step_ms"] > least_ms
    assert row["bare_rows"] > 5
    assert row["tokens_per_round"] > 0
    assert 0 < row["to_reader_us"][0] <= row["to_reader_us"][1]
    assert row["commit_to_growth_us"][0] > 0
    # Steps under way when a commit is applied.
    assert sum(row["met"]) > 10
    assert sum(row["met"][int(begun) + 1 :]) == 0
    assert {"plan", "stage", "launch", "collect", "add", "commit", "hand out", "meanwhile"} <= set(row["wall"])
    assert "A draft worker that serves" in capsys.readouterr().out


def test_the_mirror_follows_commits_and_growth_that_comes_late():
    session, chance = Session(5), random.Random(0)
    session.grow([0, 1], [1, 2], [30, 31], [0.9, 0.9], 5)
    assert session.path(chance, _SURE) == [30, 31]
    session.commit([30, 31])
    # Nothing is known of what follows, until growth below the committed nodes arrives: of the old root, and of the new.
    assert session.path(chance, _SURE) == []
    session.grow([2], [3], [32], [0.5], 5)
    assert session.path(chance, _SURE) == [32]
    session.commit([33])
    session.grow([3], [4], [34], [0.5], 7)
    assert session.path(chance, _SURE) == []
    session.grow([0], [5], [35], [0.5], 8)
    assert session.path(chance, _SURE) == [35]


def test_every_number_of_sessions_needs_the_rows_of_its_bare_steps(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        command.run(["--sessions", "1", "2", "--bare-rows", "8"])
    assert "--bare-rows: 1 given, one for each of --sessions needed" in capsys.readouterr().err
