"""When a step may be begun behind one that runs, and what promises that are not kept may cost."""

from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
import pytest

from outrider.draft_worker.session import GrowthLimits
from outrider.sampling import SamplingSpec

Make = Callable[..., Any]


def test_nothing_is_promised_by_a_step_that_ranked_nothing_although_who_asked_for_that_has_left(
    make_queued_growth: Make, make_start: Make
):
    growth, steps = make_queued_growth()
    growth.open(make_start(1))
    growth.open(make_start(2, sampling=SamplingSpec(max_new_tokens=100, presence_penalty=0.5)))
    assert growth.begin()
    growth.close((7, 2), 1)
    assert not growth.takes_another
    assert not growth.begin()
    assert growth.finish().growths
    assert growth.begin()
    assert growth.takes_another
    assert growth.begin()
    assert steps.promised > 0


def test_a_graph_is_captured_while_no_step_is_under_way(
    make_queued_growth: Make, make_start: Make, monkeypatch: pytest.MonkeyPatch
):
    growth, steps = make_queued_growth()
    captured: list[int] = []

    def capture(due: object) -> None:
        assert steps.due is due
        captured.append(growth.num_begun)
        steps.due = None

    monkeypatch.setattr(steps, "capture", capture, raising=False)
    growth.open(make_start())
    assert growth.begin()
    steps.due = object()
    assert not growth.begin()
    growth.finish()
    assert growth.begin()
    assert captured == [0]
    assert growth.begin()


def test_promises_that_are_not_kept_take_no_more_places_than_masks_have(
    make_queued_growth: Make, make_start: Make, monkeypatch: pytest.MonkeyPatch
):
    growth, _ = make_queued_growth(max_live_nodes=32, min_acceptance=0.02)
    chooser, numbers = growth._launcher._chooser, count()
    ranked = chooser.ranked

    def of_few(*found: Any) -> Any:
        """Only the first nodes have children that are likely enough."""
        tokens, acceptance, buckets = ranked(*found)
        # What is promised comes before what is known.
        growth._forest.columns.guesses[session.row] = 2.0
        return tokens, np.array([[0.9 if next(numbers) < 5 else 0.01] * len(row) for row in acceptance]), buckets

    monkeypatch.setattr(chooser, "ranked", of_few)
    session = growth.open(make_start(limits=GrowthLimits(max_live_nodes=32)))
    growth._forest.columns.guesses[session.row] = 2.0
    most = 0
    while growth.begin() or growth.num_begun:
        growth.begin()
        most = max(most, growth.slots.length(session.row) - session.length)
        growth.finish()
    assert most == 32
    # Nodes wait for a place, not for credit, and a commit gives the places back.
    assert (32 - session.tree.size) // 4 > 0 < session.tree.best_value
    growth.commit((7, 1), 1, session.length, [next(iter(session.tree.root.children))])
    assert growth.slots.length(session.row) - session.length < 32
    assert growth.begin()
