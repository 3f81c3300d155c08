import pytest

from outrider.coordinator.firing import CHILD_HIT, GrowthForecast, leaf_gain, patience_ns
from outrider.tree import TokenTree

MS = 1_000_000


def test_growth_is_due_a_step_after_the_draft_last_spoke():
    forecast = GrowthForecast(last_ns=10 * MS, step_ns=2 * MS)
    assert forecast.due_in_ns(10 * MS) == 2 * MS
    assert forecast.due_in_ns(int(11.9 * MS)) == pytest.approx(1 * MS)
    assert forecast.due_in_ns(16 * MS) is None


def test_a_draft_that_never_spoke_is_not_waited_for():
    assert GrowthForecast(last_ns=0, step_ns=0.0).due_in_ns(5) is None


def test_waiting_pays_when_the_leaves_are_worth_more_than_the_time():
    soon = GrowthForecast(last_ns=0, step_ns=2 * MS)
    outlooks = [(0.9, soon)]
    assert patience_ns(outlooks, rate=0.3 / MS, now_ns=0, left_ns=20 * MS) == 2 * MS
    assert patience_ns(outlooks, rate=0.6 / MS, now_ns=0, left_ns=20 * MS) == 0
    assert patience_ns(outlooks, rate=0.3 / MS, now_ns=0, left_ns=1 * MS) == 0


def test_one_straggler_does_not_hold_the_others():
    near, far = GrowthForecast(last_ns=0, step_ns=1 * MS), GrowthForecast(last_ns=0, step_ns=10 * MS)
    outlooks = [(0.8, near), (0.8, far)]
    assert patience_ns(outlooks, rate=0.2 / MS, now_ns=0, left_ns=20 * MS) == 1 * MS


def test_nobody_to_wait_for():
    assert patience_ns([], rate=0.1 / MS, now_ns=0, left_ns=20 * MS) == 0


def test_gain_counts_leaves_that_may_still_grow():
    tree = TokenTree(1)
    assert leaf_gain(tree.root, [], max_depth=8) == CHILD_HIT
    assert leaf_gain(tree.root, [], max_depth=0) == 0
    top = tree.add(tree.root, 2, 0.8)
    tree.add(tree.root, 3, 0.1)
    deep = tree.add(top, 4, 0.5)
    assert leaf_gain(tree.root, tree.best(10), max_depth=8) == pytest.approx(CHILD_HIT * (0.4 + 0.1))
    assert leaf_gain(tree.root, tree.best(10), max_depth=deep.depth) == pytest.approx(CHILD_HIT * 0.1)
