import random

import pytest

from outrider.coordinator.firing import LEAF_GAIN, GrowthForecast, Latency, leaf_gain, patience_ns
from outrider.tree import TokenTree

MS = 1_000_000


def steady(mean_ms: float) -> Latency:
    latency = Latency()
    for _ in range(60):
        latency.observe(mean_ms * MS)
    return latency


def forecast(mean_ms: float, *, since_ns: int = 0) -> GrowthForecast:
    return GrowthForecast(since_ns=since_ns, latency=steady(mean_ms))


def test_growth_is_due_when_it_usually_comes():
    due = forecast(2, since_ns=10 * MS).due_in_ns
    assert due(10 * MS) == pytest.approx(2 * MS)
    assert due(11 * MS) == pytest.approx(1 * MS)
    assert due(13 * MS) is None


def test_a_draft_that_never_spoke_is_not_waited_for():
    assert GrowthForecast(since_ns=0, latency=Latency()).due_in_ns(5) is None


def test_an_unsteady_draft_is_given_more_time():
    latency, chance = Latency(), random.Random(0)
    for _ in range(500):
        latency.observe(chance.choice([1, 3]) * MS)
    assert 1.2 * MS < latency.mean_ns < 2.8 * MS
    assert 0.5 * MS < latency.deviation_ns < 1.5 * MS
    assert latency.left_ns(latency.mean_ns + latency.deviation_ns) == pytest.approx(latency.deviation_ns)
    assert latency.left_ns(9 * MS) is None


def test_one_long_pause_teaches_no_patience():
    latency = steady(2)
    latency.observe(1000 * MS)
    assert latency.mean_ns < 2.5 * MS


def test_waiting_pays_when_the_leaves_are_worth_more_than_the_time():
    outlooks = [(0.9, forecast(2))]
    assert patience_ns(outlooks, rate=0.3 / MS, now_ns=0, left_ns=20 * MS) == pytest.approx(2 * MS)
    assert patience_ns(outlooks, rate=0.6 / MS, now_ns=0, left_ns=20 * MS) == 0
    assert patience_ns(outlooks, rate=0.3 / MS, now_ns=0, left_ns=1 * MS) == 0


def test_one_straggler_does_not_hold_the_others():
    outlooks = [(0.8, forecast(1)), (0.8, forecast(10))]
    assert patience_ns(outlooks, rate=0.2 / MS, now_ns=0, left_ns=20 * MS) == pytest.approx(1 * MS)


def test_nobody_to_wait_for():
    assert patience_ns([], rate=0.1 / MS, now_ns=0, left_ns=20 * MS) == 0


def test_gain_counts_leaves_that_may_still_grow():
    tree = TokenTree(1)
    assert leaf_gain(tree.root, [], max_depth=8) == LEAF_GAIN
    assert leaf_gain(tree.root, [], max_depth=0) == 0
    top = tree.add(tree.root, 2, 0.8)
    tree.add(tree.root, 3, 0.1)
    deep = tree.add(top, 4, 0.5)
    assert leaf_gain(tree.root, tree.best(10), max_depth=8) == pytest.approx(LEAF_GAIN * (0.4 + 0.1))
    assert leaf_gain(tree.root, tree.best(10), max_depth=deep.depth) == pytest.approx(LEAF_GAIN * 0.1)
