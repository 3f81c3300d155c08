"""Histograms as Prometheus reads them."""

from prometheus_client import generate_latest

from outrider.metrics.families import registry_of
from outrider.metrics.histogram import Histogram, seconds


def test_a_value_belongs_to_the_first_bound_that_is_not_below_it():
    histogram = Histogram([10, 20])
    for value in (0, 10, 11, 20, 21):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 1]
    assert histogram.cumulated() == ([("10.0", 2.0), ("20.0", 4.0), ("+Inf", 5.0)], 62.0)


def test_one_value_many_times_is_the_value_many_times():
    at_once, one_by_one = Histogram([10, 20]), Histogram([10, 20])
    at_once.observe(15, 4)
    for _ in range(4):
        one_by_one.observe(15)
    assert at_once.cumulated() == one_by_one.cumulated()


def test_nanoseconds_are_shown_as_seconds():
    histogram = seconds(0.001, 0.1)
    histogram.observe(1_000_000)
    histogram.observe(50_000_000)
    registry = registry_of(lambda families: families.histogram("taken_seconds", "a", histogram, part="step"))
    lines = generate_latest(registry).decode().splitlines()
    assert 'outrider_taken_seconds_bucket{le="0.001",part="step"} 1.0' in lines
    assert 'outrider_taken_seconds_bucket{le="0.1",part="step"} 2.0' in lines
    assert 'outrider_taken_seconds_bucket{le="+Inf",part="step"} 2.0' in lines
    assert 'outrider_taken_seconds_sum{part="step"} 0.051' in lines


def test_values_of_one_name_are_one_family_and_are_read_anew_each_time():
    counts = {"a": 1, "b": 2}
    registry = registry_of(lambda families: families.by_label("counter", "things", "a", "kind", counts))
    before = generate_latest(registry).decode()
    counts["a"] = 7
    after = generate_latest(registry).decode()
    assert before.count("# TYPE outrider_things_total counter") == 1
    assert 'outrider_things_total{kind="a"} 1.0' in before
    assert 'outrider_things_total{kind="a"} 7.0' in after
