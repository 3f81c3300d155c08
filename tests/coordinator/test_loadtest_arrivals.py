"""Arrivals: their law, at fixed seeds, and their bounds."""

import math
import statistics
from itertools import islice, pairwise

import pytest

from outrider.coordinator.loadtest.arrivals import Arrivals


def gaps(arrivals: Arrivals) -> list[float]:
    return [later - earlier for earlier, later in pairwise(arrivals.times())]


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5)])
def test_gaps_have_the_mean_of_the_rate_and_the_variation_of_the_burstiness(burstiness, variation):
    drawn = gaps(Arrivals(rate=20, burstiness=burstiness, count=8_001, seed=3))
    mean = statistics.fmean(drawn)
    # Three standard errors of a mean over 8,000 gaps.
    assert mean == pytest.approx(1 / 20, rel=3 * variation / math.sqrt(8_000))
    assert statistics.stdev(drawn) / mean == pytest.approx(variation, rel=0.08)


def test_a_poisson_process_has_exponential_gaps():
    drawn = gaps(Arrivals(rate=10, count=8_001, seed=1))
    for tenths in (0.5, 1.0, 2.0):
        share = sum(gap > tenths / 10 for gap in drawn) / len(drawn)
        assert share == pytest.approx(math.exp(-tenths), abs=0.017)


def test_fixed_arrivals_are_evenly_spaced():
    assert list(Arrivals(rate=4, shape="fixed", count=4).times()) == pytest.approx([0.0, 0.25, 0.5, 0.75])


def test_an_infinite_rate_sends_everything_at_once():
    arrivals = Arrivals(count=5)
    assert list(arrivals.times()) == [0.0] * 5
    assert arrivals.is_all_at_once


def test_the_seed_decides():
    assert list(Arrivals(rate=5, count=50, seed=7).times()) == list(Arrivals(rate=5, count=50, seed=7).times())
    assert list(Arrivals(rate=5, count=50, seed=7).times()) != list(Arrivals(rate=5, count=50, seed=8).times())


def test_nothing_arrives_after_the_duration():
    times = list(Arrivals(rate=100, duration_s=3, seed=2).times())
    assert max(times) < 3
    assert len(times) == pytest.approx(300, abs=3 * math.sqrt(300))


def test_a_linear_ramp_goes_from_its_start_to_its_end():
    arrivals = Arrivals(shape="fixed", ramp="linear", ramp_start=2, ramp_end=10, count=5)
    assert [arrivals.rate_at(number, 0.0) for number in range(5)] == pytest.approx([2, 4, 6, 8, 10])
    assert gaps(arrivals) == pytest.approx([1 / 4, 1 / 6, 1 / 8, 1 / 10])


def test_an_exponential_ramp_grows_by_the_same_factor():
    arrivals = Arrivals(ramp="exponential", ramp_start=1, ramp_end=16, count=5)
    assert [arrivals.rate_at(number, 0.0) for number in range(5)] == pytest.approx([1, 2, 4, 8, 16])


def test_without_a_count_a_ramp_follows_the_time():
    arrivals = Arrivals(ramp="linear", ramp_start=1, ramp_end=3, duration_s=10)
    assert [arrivals.rate_at(0, at_s) for at_s in (0, 5, 10)] == pytest.approx([1, 2, 3])
    assert len(list(islice(arrivals.times(), 1000))) < 100


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"rate": 0.0}, "request_rate: 0.0"),
        ({"rate": math.nan}, "request_rate"),
        ({"burstiness": 0.0}, "burstiness: 0.0"),
        ({"ramp_start": 0.0}, "ramp_up_start_rps"),
        ({"count": None}, "num_prompts"),
    ],
)
def test_bad_values_are_named(changes, word):
    with pytest.raises(ValueError, match=word):
        Arrivals(**{"count": 1} | changes)
