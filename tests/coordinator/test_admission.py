"""Admission to the queue, and the time that refused requests are told to stay away."""

import pytest

from outrider.coordinator.sessions import clock
from outrider.coordinator.sessions.admission import Admission, Occupancy
from outrider.errors import Overloaded


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> int:
        return round(self.now_s * 1e9)


@pytest.fixture
def time(monkeypatch) -> Clock:
    now = Clock()
    monkeypatch.setattr(clock, "now_ns", now)
    return now


def make_admission(**changes) -> Admission:
    return Admission(**{"max_queue": None, "max_wait_s": None, "retry_after_s": 1.0} | changes)


def full(entries: int, *, places: int = 64, choices: int = 1, **more: int) -> Occupancy:
    return Occupancy(places=places, free=0, waiting=entries * choices, entries=entries, **more)


def runs(admission: Admission, time: Clock, *lengths_s: float) -> None:
    for session_id, length_s in enumerate(lengths_s):
        admission.note_start(session_id)
        time.now_s += length_s
        admission.note_end(session_id)


@pytest.mark.parametrize(
    ("max_queue", "choices", "occupancy", "fits"),
    [
        # By default a thousand may wait, or four for each place; how many choices each has is all the same.
        (None, 1, full(999, choices=16), True),
        (None, 1, full(1000), False),
        (None, 16, full(1999, places=500), True),
        (None, 1, full(2000, places=500), False),
        # Their prompts have to fit into memory.
        (None, 1, full(2, tokens=(16 << 20) - 1), True),
        (None, 1, full(2, tokens=16 << 20), False),
        (2, 1, full(1), True),
        (2, 1, full(2), False),
        # What need not wait needs no queue.
        (0, 4, Occupancy(places=8, free=4, waiting=0, entries=0), True),
        (0, 5, Occupancy(places=8, free=4, waiting=0, entries=0), False),
    ],
)
def test_the_bound_in_number(max_queue, choices, occupancy, fits):
    admission = make_admission(max_queue=max_queue)
    if fits:
        admission.check(choices, occupancy)
    else:
        with pytest.raises(Overloaded, match="is full"):
            admission.check(choices, occupancy)


def test_the_bound_in_time_follows_the_runs(time):
    admission = make_admission(max_queue=1000, max_wait_s=1.0)
    # Nothing is known yet: the number alone bounds.
    admission.check(1, full(900))
    # Four places, runs of 2 s: one ends every 0.5 s, so the second in the queue waits 1 s and the third 1.5 s.
    runs(admission, time, 2.0, 1.0, 3.0)
    assert admission.run_s == pytest.approx(2.0)
    admission.check(1, full(1, places=4))
    with pytest.raises(Overloaded, match=r"wait 1\.5 s, at most 1 s") as caught:
        admission.check(1, full(2, places=4))
    assert caught.value.retry_after_s == pytest.approx(1.0)
    # A free place is no wait, and the choices behind the first one do not count.
    admission.check(16, Occupancy(places=4, free=1, waiting=0, entries=0))


def test_a_target_that_stands_still_shows_before_any_run_ends(time):
    admission = make_admission(max_wait_s=1.0)
    runs(admission, time, 0.5)
    for session_id in range(4):
        admission.note_start(session_id)
    admission.check(1, full(0, places=4))
    time.now_s += 8
    with pytest.raises(Overloaded):
        admission.check(1, full(0, places=4))
    # Whoever is placed anew, its target lost, begins again; whoever never had a place counts for nothing.
    for session_id in range(4):
        admission.note_start(session_id)
    admission.note_end(99)
    admission.check(1, full(0, places=4))


def test_runs_of_long_ago_are_forgotten(time):
    admission = make_admission()
    runs(admission, time, *[10.0] * 40)
    runs(admission, time, *[1.0] * 150)
    assert admission.run_s == pytest.approx(1.0, rel=0.1)


def test_as_many_may_wait_as_begin_within_a_minute(time):
    admission = make_admission()
    runs(admission, time, 0.5)
    # 64 places that are free again every half second: 7,680 in a minute.
    admission.check(1, full(7679))
    with pytest.raises(Overloaded, match="7680"):
        admission.check(1, full(7680))


def test_each_refused_client_comes_back_when_one_more_has_left_the_queue(time):
    admission = make_admission(max_queue=4, retry_after_s=0.5)
    runs(admission, time, 8.0)

    def told(**occupancy: int) -> float:
        with pytest.raises(Overloaded) as caught:
            admission.check(1, full(4, **occupancy))
        return caught.value.retry_after_s

    # Eight places, runs of 8 s: a choice leaves the queue every second, a request of two choices every other.
    assert [told(places=8) for _ in range(4)] == pytest.approx([0.5, 1.5, 2.5, 3.5])
    assert told(places=8, choices=2) == pytest.approx(5.5)
    time.now_s += 4
    assert told(places=8) == pytest.approx(2.5)
    time.now_s += 100
    assert told(places=8) == pytest.approx(0.5)
    # Whoever comes again and again, whatever it is told, does not send others away for ever.
    assert max(told(places=8) for _ in range(200)) <= 40
