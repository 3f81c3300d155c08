"""Whether the model of drafts' worth says what the simulated service does."""

from dataclasses import replace

import pytest
from benchmarks.autoscaling_bench.prediction import BASE, play

from outrider.coordinator.sessions.messages import SpeculationMode

SLOW = replace(BASE, sessions=16, draft_step_ms=2.5, draft_width=8, warmup_s=0.5, duration_s=0.8)


def test_the_model_knows_the_speed_that_is_there_and_roughly_that_of_one_draft_more_or_less():
    plain, _ = play(replace(SLOW, mode=SpeculationMode.OFF))
    one, from_one = play(SLOW)
    two, from_two = play(replace(SLOW, workers=2))
    assert from_one[0] == 1
    assert from_one[1] == pytest.approx(one / plain, rel=0.05)
    assert from_two[2] == pytest.approx(two / plain, rel=0.05)
    # 1.2 times as fast with the second one.
    assert two / one > 1.15
    assert from_one[2] == pytest.approx(two / plain, rel=0.15)
    assert from_two[1] == pytest.approx(one / plain, rel=0.15)


def test_a_draft_that_keeps_up_with_its_sessions_is_said_to_be_enough():
    _, speed = play(replace(SLOW, sessions=4, draft_step_ms=0.75, draft_width=64))
    assert speed[1] > 2
    assert speed[4] / speed[1] < 1.04
