import random

import pytest

from outrider.coordinator.cost_model import StepCost


def test_before_any_measurement_the_prior_counts():
    assert StepCost(base_ns=100.0, row_ns=2.0).predict_ns(11) == 120.0


def test_it_learns_a_curve_from_noisy_times():
    cost, chance = StepCost(), random.Random(0)
    for _ in range(600):
        rows = chance.choice([1, 4, 8, 16, 32, 64])
        cost.observe(rows, (4e6 + 5e4 * rows) * chance.uniform(0.95, 1.05))
    for rows in (1, 6, 16, 24, 48, 64, 100):
        assert cost.predict_ns(rows) == pytest.approx(4e6 + 5e4 * rows, rel=0.06)


def test_it_never_falls_with_the_rows():
    cost, chance = StepCost(), random.Random(1)
    for _ in range(200):
        cost.observe(chance.randrange(1, 300), chance.uniform(1e6, 9e6))
    values = [cost.predict_ns(rows) for rows in range(1, 400)]
    assert values == sorted(values)


def test_it_follows_a_change():
    cost = StepCost()
    for _ in range(100):
        cost.observe(8, 1e6)
    for _ in range(100):
        cost.observe(8, 2e6)
    assert cost.predict_ns(8) == pytest.approx(2e6, rel=0.01)


def test_one_outlier_is_bounded():
    cost = StepCost()
    for _ in range(50):
        cost.observe(8, 1e6)
    cost.observe(8, 1e9)
    assert cost.predict_ns(8) < 1.3e6


def test_nonsense_is_not_learned():
    cost = StepCost(base_ns=7.0)
    cost.observe(0, 5.0)
    cost.observe(3, 0)
    assert cost.predict_ns(1) == 7.0


def test_bad_luck_with_one_size_is_forgotten():
    """A size measured once, at a bad moment, and avoided since: its estimate returns to what its neighbours say."""
    cost = StepCost()
    for _ in range(20):
        for rows in (1, 8, 24):
            cost.observe(rows, 4e6 + 5e4 * rows)
    for _ in range(5):
        cost.observe(4, 12e6)
    assert cost.predict_ns(4) > 7e6
    for _ in range(800):
        for rows in (1, 8, 24):
            cost.observe(rows, 4e6 + 5e4 * rows)
    assert cost.predict_ns(4) == pytest.approx(4.2e6, rel=0.1)
