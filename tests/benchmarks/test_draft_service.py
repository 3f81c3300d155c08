"""The benchmark of a draft worker that serves, without a GPU."""

import json
import random
from pathlib import Path

from benchmarks.draft_service_bench import command
from benchmarks.draft_service_bench.coordinator import Load, Session

_SURE = Load(
    sessions=1, prompt_tokens=5, round_ms=1.0, acceptance=1.0, temperature=0.0, vocab_size=96, max_len=99
)  # fmt: skip


def test_every_figure_of_a_worker_that_serves_is_there(tmp_path: Path):
    file = tmp_path / "figures.json"
    arguments = ["--sessions", "1", "2", "--seconds", "0.8", "--warm-up", "0.2", "--repeats", "1", "--round-ms", "50"]
    assert command.run([*arguments, "--json", str(file)]) == 0
    document = json.loads(file.read_text())
    assert document["command"].startswith("python benchmarks/draft_service.py --sessions 1 2")
    assert [row["sessions"] for row in document["rows"]] == [1, 2]
    for row in document["rows"]:
        (found,) = row["repeats"]
        assert found["steps"] > 0
        assert found["device_ms"] > 0
        assert 0 < found["growing"] <= 1
        assert found["device_idle"] < 1
        assert found["rows"] >= 1
        assert found["nodes_per_s"] > found["steps_per_s"] / 2
        assert found["commits"] > 0
        assert found["tokens_per_commit"] >= 1
        assert 0 < found["answered"] <= 1
        assert 0 < found["answer_ms"][0] <= found["answer_ms"][1]
        assert 1 <= found["answer_steps"][0] <= found["answer_steps"][1]


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
