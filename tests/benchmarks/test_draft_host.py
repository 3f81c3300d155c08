"""The draft of the simulator whose steps overlap: exact, lossless, and what it is for."""

import json
from dataclasses import replace

import pytest
from benchmarks.simulation.draft_host import run, settings_of, simulate_host
from benchmarks.simulation.queued_draft import DraftTimes

TIMES = DraftTimes()


@pytest.mark.parametrize("sessions", [1, 4])
def test_steps_that_overlap_grow_more_and_lose_nothing(sessions: int):
    settings = settings_of(sessions, "80", 512, 0.3)
    overlapping, alone = (simulate_host(settings, replace(TIMES, begun=begun)) for begun in (2, 1))
    assert overlapping["wrong_tokens"] == alone["wrong_tokens"] == 0
    assert overlapping["draft_steps"] > 1.2 * alone["draft_steps"]
    assert overlapping["tokens_per_s"] > alone["tokens_per_s"] > 0
    assert alone["met"][1:] != [0, 0] and alone["met"][2] == 0


def test_a_run_is_exact():
    settings = settings_of(1, "65", 128, 0.2)
    assert simulate_host(settings, TIMES) == simulate_host(settings, TIMES)


def test_what_a_commit_waits_for_is_sent_before_the_next_step_is_planned():
    settings = settings_of(1, "45", 128, 0.3)
    first, last = (simulate_host(settings, replace(TIMES, sends_late=late)) for late in (False, True))
    # The whole of a begin, which the device does not need.
    assert last["answer_ms"] - first["answer_ms"] == pytest.approx(TIMES.begin, abs=0.05)


def test_every_way_of_every_load_has_its_row(capsys: pytest.CaptureFixture[str]):
    options = ["--sessions", "1", "--live-nodes", "64", "--right", "65", "--duration", "0.1", "--json"]
    assert run(options) == 0
    shown = capsys.readouterr()
    rows = json.loads(shown.out)
    assert len({row["way"] for row in rows}) == len(rows) == 4
    assert all(row["tokens_per_s"] > 0 and row["wrong_tokens"] == 0 for row in rows)
    assert "a draft's host on virtual time" in shown.err


def test_a_draft_without_credit_stands_still():
    few, many = (simulate_host(settings_of(1, "80", live_nodes, 0.3), TIMES) for live_nodes in (64, 512))
    assert few["draft_steps"] < 0.7 * many["draft_steps"]
    assert few["met"][0] > 0.8 * sum(few["met"])
