"""Requests that change their kind, on virtual time."""

import json

import pytest
from benchmarks.simulation.changing_requests import Case, Shown, run, shares


def shown(tokens_per_s: float) -> Shown:
    return Shown(tokens_per_s=tokens_per_s, acceptance_length=2.0, target_busy=1.0, ways={}, wrong_tokens=0)


def test_the_last_phase_is_what_is_measured():
    """Of greedy requests drafts guess most, of sampled ones about a half."""
    greedy, sampled = (Case(sessions=2, timing="never-wait", phases=phases).run() for phases in ((1.2,), (0.3, 1.2)))
    assert greedy.acceptance_length > 2 * sampled.acceptance_length > 2
    assert greedy.wrong_tokens == sampled.wrong_tokens == 0
    assert greedy.ways == {"never_wait": 1.0}


def test_shares_are_of_the_way_that_is_best_on_the_mean():
    rates = {("learned", 0): 95.0, ("learned", 1): 110.0, ("wait", 0): 100.0, ("wait", 1): 100.0, ("ahead", 0): 120.0}
    found = {Case(sessions=1, timing=timing, seed=seed): shown(rate) for (timing, seed), rate in rates.items()}  # pyright: ignore[reportArgumentType]
    found[Case(sessions=1, timing="ahead", seed=1)] = shown(60.0)
    assert shares(found, sessions=1)["learned"] == pytest.approx([0.95, 1.1])


def test_the_command_line_compares_the_learned_choice_with_ways(capsys):
    options = ("--sessions", "1", "--seeds", "1", "--phases", "0.2", "1", "--rounds", "learned", "wait", "--jobs", "1")
    assert run((*options, "--json")) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["timing"] for row in rows] == ["learned", "wait"]


def test_a_phase_too_short_to_be_measured_is_refused(capsys):
    with pytest.raises(SystemExit):
        run(("--phases", "6", "0.5"))
    assert "0.5 s" in capsys.readouterr().err
