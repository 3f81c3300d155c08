import random

import numpy as np
import pytest

from outrider.coordinator.choice_kernels import rising
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


def test_a_slow_first_step_says_nothing_of_larger_ones():
    """Pages, kernels and clocks come with the first steps, which are small."""
    cost = StepCost()
    cost.observe(16, 130e6)
    for number in range(100):
        cost.observe(160 + number % 40, 10e6)
    assert cost.predict_ns(180) == pytest.approx(10e6, rel=0.1)
    assert cost.predict_ns(300) < 20e6


@pytest.mark.parametrize("step_ns", [60e6, 3.1e9], ids=["as such a step takes", "a kernel was compiled"])
def test_prompts_say_nothing_of_what_a_few_rows_more_would_cost(step_ns):
    """Plain decoding and prompts are all that was seen: trees must seem worth a trial."""
    cost = StepCost()
    for number in range(60):
        cost.observe(16, 5.2e6)
        if number % 20 == 10:
            cost.observe(3456, step_ns)
    assert cost.predict_ns(64) < 1.15 * 5.2e6
    assert cost.predict_ns(192) < 1.5 * 5.2e6
    assert cost.predict_ns(3456) > 15e6


def test_between_two_sizes_that_are_known_nothing_costs_more_than_the_larger():
    cost = StepCost()
    for _ in range(50):
        for rows in (1, 8, 16, 200):
            cost.observe(rows, 4e6 + 2e5 * min(rows, 16))
    sizes = [cost.predict_ns(rows) for rows in range(16, 200, 8)]
    assert max(sizes) < 1.05 * 7.2e6


def test_a_large_step_that_cannot_have_been_so_fast_is_soon_forgotten():
    cost = StepCost()
    for _ in range(50):
        cost.observe(8, 5e6)
    cost.observe(256, 1e5)
    assert cost.predict_ns(8) > 2e6
    for _ in range(30):
        cost.observe(8, 5e6)
    assert cost.predict_ns(8) == pytest.approx(5e6, rel=0.1)


@pytest.mark.parametrize("seed", range(20))
def test_levels_that_fall_are_pooled(seed):
    chance = random.Random(seed)
    levels = np.array([chance.uniform(0, 10) for _ in range(12)])
    weights = np.array([chance.uniform(0.1, 5) for _ in range(12)])
    found = rising(levels, weights)
    assert (np.diff(found) >= 0).all()

    def distance(other: np.ndarray) -> float:
        return float(weights @ (levels - other) ** 2)

    # No other that never falls comes nearer.
    for _ in range(200):
        other = np.maximum.accumulate(found + np.array([chance.gauss(0, 0.3) for _ in levels]))
        assert distance(found) <= distance(other)
    assert rising(found, weights).tolist() == pytest.approx(found.tolist())


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
    # Larger steps have shown better times, far more often.
    assert 4.5e6 < cost.predict_ns(4) < 7e6
    for _ in range(800):
        for rows in (1, 8, 24):
            cost.observe(rows, 4e6 + 5e4 * rows)
    assert cost.predict_ns(4) == pytest.approx(4.2e6, rel=0.1)


def test_one_size_alone_lets_larger_ones_hope():
    """A step that read all weights once costs hardly more for some rows more: fear would never be corrected."""
    cost = StepCost()
    for _ in range(50):
        cost.observe(128, 9e6)
    assert 9e6 <= cost.predict_ns(256) < 1.4 * 9e6
    for _ in range(3):
        cost.observe(256, 18e6)
    assert cost.predict_ns(256) > 15e6


def test_it_learns_stairs_and_fills_them():
    cost, chance = StepCost(), random.Random(2)

    def stairs_ns(rows: int) -> float:
        return 4e6 + 1e6 * -(-rows // 32)

    for _ in range(3000):
        rows = chance.randrange(1, 129)
        cost.observe(rows, stairs_ns(rows) * chance.uniform(0.98, 1.02))
    for rows in (3, 30, 40, 60, 70, 90, 100, 126):
        assert cost.predict_ns(rows) == pytest.approx(stairs_ns(rows), rel=0.06)
    # Within a stair a row is nearly free, the step up is not.
    within, across = cost.predict_ns(63) - cost.predict_ns(50), cost.predict_ns(70) - cost.predict_ns(63)
    assert across > 3 * within


def test_one_row_or_many_at_once():
    cost = StepCost()
    for rows in (1, 8, 64, 200):
        cost.observe(rows, 4e6 + 2e4 * rows)
    rows = np.array([1, 5, 64, 300, 10_000])
    assert cost.predict_many_ns(rows).tolist() == [cost.predict_ns(count) for count in rows.tolist()]


def test_what_was_not_measured_lately_is_unknown():
    cost = StepCost()
    cost.observe(8, 1e6)
    assert cost.is_known(7)
    assert not cost.is_known(100)
    for _ in range(200):
        cost.observe(100, 2e6)
    assert not cost.is_known(7)
    assert cost.is_known(100)


def test_prompts_leave_what_is_known_of_small_steps_alone():
    """Half of all steps are prompts, and a hundred times as slow: small ones cost what they were measured to."""
    cost = StepCost()
    for number in range(200):
        cost.observe(4 + number % 9, 2e6 + 5e5 * (4 + number % 9))
        cost.observe(500 + 5 * number, 2e6 + 5e5 * (500 + 5 * number))
    for rows in (4, 8, 12):
        assert cost.predict_ns(rows) == pytest.approx(2e6 + 5e5 * rows, rel=0.1)


def test_below_all_sizes_that_were_measured_the_line_goes_on_down():
    """Else smaller steps would seem to save nothing, and never come; the smallest measured ones would, too."""
    cost = StepCost()
    for number in range(300):
        cost.observe(9 + number % 32, 2e6 + 5e5 * (9 + number % 32))
    for rows in (5, 8, 9, 12):
        assert cost.predict_ns(rows) == pytest.approx(2e6 + 5e5 * rows, rel=0.15)
    # No further than half: it may be a staircase all the same.
    assert cost.predict_ns(1) > 4e6
