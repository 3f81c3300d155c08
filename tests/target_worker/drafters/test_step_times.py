"""Times of growth steps, by what decides them."""

from outrider.target_worker.drafters.step_times import StepTimes


def test_captured_times_are_known_and_follow_what_steps_take():
    times = StepTimes([100.0, 400.0], [10.0, 40.0])
    assert times.expected_ns(1, 64, reads=False) == 400
    assert times.expected_ns(1, 64, reads=True) == 40
    for _ in range(60):
        times.note(1, 64, 900, reads=False)
    assert 890 < (times.expected_ns(1, 64, reads=False) or 0) <= 900
    # What many sessions' bucket takes says nothing of few sessions'.
    assert times.expected_ns(0, 1, reads=False) == 100
    assert times.expected_ns(1, 64, reads=True) == 40


def test_buckets_are_chosen_by_the_same_times():
    times = StepTimes([100.0, 400.0], [10.0, 40.0])
    times.note(1, 64, 1400, reads=False)
    assert times.of_buckets(reads=False) == [100, 500]
    assert times.of_buckets(reads=True) == [10, 40]
    assert StepTimes().of_buckets(reads=False) == []


def test_without_graphs_steps_are_alike_by_their_sessions_and_the_first_ones_are_not_believed():
    times = StepTimes()
    times.note(0, 4, 1e4, reads=False)
    for _ in range(15):
        assert times.expected_ns(0, 4, reads=False) is None
        times.note(0, 5, 100, reads=False)
    for _ in range(60):
        times.note(0, 6, 100, reads=False)
    assert times.expected_ns(0, 4, reads=False) == times.expected_ns(0, 7, reads=False)
    assert abs((times.expected_ns(0, 4, reads=False) or 0) - 100) < 5
    assert times.expected_ns(0, 8, reads=False) is None
    # A step that reads takes at most what one with a pass of its own does.
    assert times.expected_ns(0, 4, reads=True) == times.expected_ns(0, 4, reads=False)
