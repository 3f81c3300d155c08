"""Who may wait, and how long those who may not are told to stay away."""

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
    settings = {"max_queue": None, "max_wait_s": None, "retry_after_s": 1.0, "spread": lambda: 1.0} | changes
    return Admission(**settings)


def full(waiting: int, *, places: int = 64) -> Occupancy:
    return Occupancy(places=places, free=0, waiting=waiting)


def runs(admission: Admission, time: Clock, *lengths_s: float) -> None:
    for session_id, length_s in enumerate(lengths_s):
        admission.note_start(session_id)
        time.now_s += length_s
        admission.note_end(session_id)


@pytest.mark.parametrize(
    ("max_queue", "choices", "occupancy", "fits"),
    [
        # By default half as many may wait as may run,
        (None, 1, full(31), True),
        (None, 1, full(32), False),
        (None, 3, full(30), False),
        # but never so few that a request of 16 choices finds no room at all.
        (None, 16, full(0, places=2), True),
        (None, 16, full(1, places=2), False),
        (2, 1, full(1), True),
        (2, 1, full(2), False),
        (0, 4, Occupancy(places=8, free=4, waiting=0), True),
        (0, 5, Occupancy(places=8, free=4, waiting=0), False),
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
    assert caught.value.retry_after_s == pytest.approx(1.5)
    # A free place is no wait, and the choices behind the first one do not count.
    admission.check(16, Occupancy(places=4, free=1, waiting=0))


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


def test_refused_clients_come_back_apart_and_not_before_there_may_be_room(time):
    told = []
    admission = Admission(max_queue=4, max_wait_s=None, retry_after_s=0.5)
    runs(admission, time, 8.0)
    for _ in range(50):
        with pytest.raises(Overloaded) as caught:
            admission.check(1, full(4, places=8))
        told.append(caught.value.retry_after_s)
    # The fifth in the queue would have waited 5 s.
    assert min(told) >= 5.0
    assert max(told) <= 7.5
    assert max(told) - min(told) > 0.5
    runs(admission, time, *[10_000.0] * 50)
    with pytest.raises(Overloaded) as caught:
        admission.check(1, full(4, places=8))
    assert caught.value.retry_after_s <= 45
