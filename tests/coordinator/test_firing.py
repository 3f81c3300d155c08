import random

import pytest

from outrider.coordinator.firing import _EMPHASIS, LEVELS, GrowthForecast, Latency, MissRates, Outlook, patience_ns

MS = 1_000_000
# A level is worth this much for a leaf that is surely reached; those after it nothing.
ONE_LEVEL = [1.0]


def steady(mean_ms: float) -> Latency:
    latency = Latency()
    for _ in range(60):
        latency.observe(mean_ms * MS)
    return latency


def forecast(mean_ms: float, *, since_ns: int = 0) -> GrowthForecast:
    return GrowthForecast(since_ns=since_ns, latency=steady(mean_ms), step=steady(1))


def outlook(value: float, mean_ms: float) -> Outlook:
    return Outlook(forecast=forecast(mean_ms), value=value)


def test_growth_is_due_when_it_usually_comes():
    due = forecast(2, since_ns=10 * MS).due_in_ns
    assert due(10 * MS) == pytest.approx(2 * MS)
    assert due(11 * MS) == pytest.approx(1 * MS)
    assert due(13 * MS) is None


def test_a_draft_that_never_spoke_is_not_waited_for():
    assert GrowthForecast(since_ns=0, latency=Latency(), step=Latency()).due_in_ns(5) is None


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
    outlooks = [outlook(0.9, 2)]
    assert patience_ns(outlooks, gains=ONE_LEVEL, rate=0.3 / MS, now_ns=0, left_ns=20 * MS) == pytest.approx(2 * MS)
    assert patience_ns(outlooks, gains=ONE_LEVEL, rate=0.6 / MS, now_ns=0, left_ns=20 * MS) == 0
    assert patience_ns(outlooks, gains=ONE_LEVEL, rate=0.3 / MS, now_ns=0, left_ns=1 * MS) == 0


def test_several_levels_may_pay_for_a_wait_that_one_does_not():
    outlooks = [outlook(1.0, 4)]
    assert patience_ns(outlooks, gains=[1.0], rate=0.3 / MS, now_ns=0, left_ns=20 * MS) == 0
    # Asked again when the first of them is in.
    waits = patience_ns(outlooks, gains=[1.0, 0.8, 0.6], rate=0.3 / MS, now_ns=0, left_ns=20 * MS)
    assert waits == pytest.approx(4 * MS)


def test_one_straggler_does_not_hold_the_others():
    outlooks = [outlook(0.8, 1), outlook(0.8, 10)]
    assert patience_ns(outlooks, gains=ONE_LEVEL, rate=0.2 / MS, now_ns=0, left_ns=20 * MS) == pytest.approx(1 * MS)


def test_nobody_to_wait_for():
    assert patience_ns([], gains=ONE_LEVEL, rate=0.1 / MS, now_ns=0, left_ns=20 * MS) == 0


def test_misses_give_the_worth_of_a_level():
    """Rounds of four tokens of which every other one ends in a miss: h = 7/8, a = 4, p = 1/2."""
    misses = MissRates()
    for number in range(4000):
        missed = number % 2 == 0
        misses.observe_many(1, tokens=4, misses=missed, tree_rounds=1, tree_misses=missed)
    assert misses.tokens_per_round == pytest.approx(4, rel=0.01)
    assert misses.hit == pytest.approx(7 / 8, rel=0.01)
    assert misses.miss_per_round == pytest.approx(1 / 2, rel=0.02)
    gains = misses.level_gains()
    assert len(gains) == LEVELS
    assert sum(gains) == pytest.approx(_EMPHASIS * 4 / 0.5 * 7 / 8 * (1 - (7 / 8) ** LEVELS), rel=0.03)


def test_a_draft_that_never_misses_needs_no_wait():
    misses = MissRates()
    for _ in range(4000):
        misses.observe_many(1, tokens=8, misses=0, tree_rounds=1, tree_misses=0)
    assert sum(misses.level_gains()) < 0.01
