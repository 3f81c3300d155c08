"""The benchmark of rounds, without a GPU."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from benchmarks.rounds import timeline
from benchmarks.rounds.command import run
from benchmarks.rounds.drafters import Grown, ReplayDrafter, ReplayOptions
from benchmarks.rounds.driving import BenchSession, Commit, Recorder, Round, Written
from benchmarks.rounds.figures import figures

from outrider.models import embedded_draft_path
from outrider.sampling import SamplingSpec

_PNG = b"\x89PNG\r\n\x1a\n"
_MS = 1_000_000


def test_every_figure_of_every_mode_is_there(tmp_path: Path):
    results, picture, again = (tmp_path / name for name in ("rounds.json", "rounds.png", "again.png"))
    tiny = ["--sessions", "2", "--prompt-tokens", "12", "--max-new-tokens", "20", "--rounds", "4", "--warm-up", "0"]
    replay = ["--chance", "1", "--depth", "3", "--delay-ms", "0"]
    options = [*tiny, *replay, "--modes", "off", "replay"]
    assert run([*options, "--timeline", str(picture), "--output", str(results)]) == 0
    document = json.loads(results.read_text())
    assert document["command"].startswith("python benchmarks/rounds --sessions 2")
    # Next to nothing where an earlier test has compiled what rounds need.
    assert 0 <= document["start_up"]["warm_up_s"] < 600
    assert [cell["mode"] for cell in document["cells"]] == ["off", "replay"]
    for cell in document["cells"]:
        assert cell["rounds"] >= 4
        for name in ("round_ms", "exposed_ms", "forward_ms", "choose_walk_ms"):
            assert 0 < cell[name][0] <= cell[name][1]
        assert cell["exposed_ms"][0] < cell["round_ms"][0]
        assert cell["tokens_per_s"] > 0
    off, replayed = document["cells"]
    assert (off["tokens_per_round"], off["accepted_per_round"], off["selected_rows"]) == (1, 0, 0)
    # Its nodes are right, and there at once.
    assert replayed["accepted_per_round"] > 1
    assert document["timeline"]["due"] >= document["timeline"]["selected"]
    assert picture.read_bytes().startswith(_PNG)
    assert run(["--draw", str(results), "--timeline", str(again)]) == 0
    assert again.read_bytes().startswith(_PNG)


def test_growth_steps_of_a_resident_drafter_have_their_time(tmp_path: Path):
    results, draft = tmp_path / "rounds.json", str(embedded_draft_path())
    tiny = ["--sessions", "1", "--prompt-tokens", "12", "--max-new-tokens", "20", "--rounds", "4", "--warm-up", "0"]
    assert run([*tiny, "--modes", "off", "resident", "--draft", draft, "--output", str(results)]) == 0
    off, resident = json.loads(results.read_text())["cells"]
    assert off["growth_steps_ms"] == [0, 0]
    assert 0 < resident["growth_steps_ms"][1] < resident["exposed_ms"][1]
    assert resident["idle_ms"][0] < resident["exposed_ms"][0]


def test_a_resident_drafter_needs_a_checkpoint(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        run(["--modes", "resident"])
    assert "--modes resident and --draft: give both or none" in capsys.readouterr().err


def test_a_timeline_needs_a_file_to_be_drawn_to(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        run(["--draw", "results.json"])
    assert "--draw: needs --timeline FILE.png" in capsys.readouterr().err


def test_a_round_is_exposed_where_nothing_is_computed_for_it():
    first = _round([0, 1, 5, 6, 7])
    rounds = [first, _round([8, 9, 14, 16, 17], measured=True, rows=3, tokens=2, accepted=1)]
    found = figures(rounds)
    assert found["round_ms"] == [10, 10]
    assert found["exposed_ms"] == [3, 3]
    assert (found["forward_ms"][0], found["choose_walk_ms"][0]) == (5, 2)
    assert (found["tokens_per_s"], found["accepted_per_round"], found["selected_rows"]) == (200, 1, 2)
    assert figures([first]) == {"rounds": 0}


def test_replayed_trees_are_as_right_as_deep_and_as_late_as_asked_for():
    options = ReplayOptions(chance=1.0, depth=3, delay_ms=2.0)
    drafter = ReplayDrafter({1: [5, 6, 7, 8]}, options, vocab_size=50)
    drafter.open(1, [3, 4], SamplingSpec())
    drafter.commit(1, [5, 6], 10 * _MS)
    assert drafter.take(11 * _MS) is None
    grown = drafter.take(12 * _MS)
    assert grown is not None
    # What was recorded ends after two levels.
    assert (grown.as_of, grown.parents, grown.node_ids) == (4, [0, 1], [1, 2])
    assert grown.tokens == [7, 8]
    assert drafter.take(12 * _MS) is None
    drafter.commit(1, [7], 12 * _MS)
    drafter.close(1)
    assert drafter.take(99 * _MS) is None


def test_growth_is_due_in_the_first_round_that_begins_behind_it_and_its_lead():
    session = BenchSession(number=1, prompt=[1, 2], sampling=SamplingSpec(), output=[3, 4, 5, 6, 7])
    recorder = Recorder(keeps=True)
    recorder.written += [
        # In time for the second round, which accepts both.
        _written(0, 9.5, as_of=2, tokens=[3, 4, 5]),
        # Wrong from its first node on.
        _written(1, 9.6, as_of=2, tokens=[9, 4, 5]),
        # Begins less than 0.2 ms before the third round, which already selects it: due nowhere.
        _written(2, 19.9, as_of=5, tokens=[6]),
        # As late, and selected in the fourth.
        _written(3, 19.95, as_of=5, tokens=[6, 7]),
    ]
    recorder.rounds += [
        _round([0, 1, 2, 3, 4], commits=[Commit(number=1, tokens=[3], kinds=[])]),
        _round([10, 11, 12, 13, 14], commits=[Commit(number=1, tokens=[4, 5], kinds=[0b1])]),
        _round([20, 21, 22, 23, 24], commits=[Commit(number=1, tokens=[6], kinds=[0b100])]),
        _round([30, 31, 32, 33, 34], commits=[Commit(number=1, tokens=[7], kinds=[0b1000])]),
    ]
    _, found = timeline.follow(recorder, [session], generation=0, offset_ns=0)
    assert [(selected.due, selected.round) for selected in found] == [(1, 1), (None, None), (None, 2), (3, 3)]
    assert timeline.check(found) == (2, 2)
    # By a clock that is 10 ms ahead, the first one's round began before it.
    _, late = timeline.follow(recorder, [session], generation=0, offset_ns=10 * _MS)
    assert (late[0].due, late[0].round) == (None, None)


def _round(
    times_ms: Sequence[float], *, measured: bool = False, rows: int = 1, tokens: int = 1, accepted: int = 0, **more: Any
) -> Round:
    times, commits = [round(_MS * at) for at in times_ms], more.get("commits", ())
    return Round(
        generation=0, measured=measured, times_ns=times, sessions=1, rows=rows, tokens=tokens, accepted=accepted,
        commits=commits,
    )  # fmt: skip


def _written(kind: int, at_ms: float, *, as_of: int, tokens: Sequence[int]) -> Written:
    """A chain."""
    ids = [100 * (kind + 1) + place for place in range(len(tokens))]
    parents, acceptances = [0, *ids[:-1]], [0.9] * len(tokens)
    grown = Grown(number=1, as_of=as_of, node_ids=ids, parents=parents, tokens=tokens, acceptances=acceptances)
    return Written(kind=kind, at_ns=round(_MS * at_ms), grown=grown)
