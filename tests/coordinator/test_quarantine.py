"""Workers that are lost again and again."""

import itertools
from collections.abc import Iterator

import pytest

from outrider.coordinator.sessions import clock
from outrider.coordinator.workers.quarantine import Quarantine


class Time:
    def __init__(self) -> None:
        self.now_s = 1000.0


@pytest.fixture
def time() -> Iterator[Time]:
    found = Time()
    with clock.replaced_by(lambda: int(found.now_s * 1e9)):
        yield found


def test_three_losses_in_a_window_and_every_further_one_doubles_the_pause(time: Time) -> None:
    quarantine = Quarantine(losses=3, window_s=60, pause_s=5)
    pauses = []
    for _ in range(8):
        pauses.append(quarantine.note_loss("worker"))
        time.now_s += pauses[-1] + 1
    assert pauses == [0, 0, 5, 10, 20, 40, 60, 60]
    assert quarantine.left_s("worker") == 0
    assert quarantine.left_s("another") == 0


def test_losses_far_apart_are_not_added_up(time: Time) -> None:
    quarantine = Quarantine(losses=3, window_s=60, pause_s=5)
    for _ in range(20):
        assert quarantine.note_loss("worker") == 0
        time.now_s += 31


def test_who_stays_for_a_window_after_a_pause_starts_afresh(time: Time) -> None:
    quarantine = Quarantine(losses=2, window_s=60, pause_s=5)
    assert [quarantine.note_loss("worker") for _ in range(3)] == [0, 5, 10]
    assert quarantine.left_s("worker") == 10
    time.now_s += 4
    assert quarantine.left_s("worker") == 6
    time.now_s += 6 + 61
    assert [quarantine.note_loss("worker") for _ in range(2)] == [0, 5]


def test_what_is_remembered_is_bounded(time: Time) -> None:
    quarantine = Quarantine(losses=1, window_s=60, pause_s=50)
    for number in itertools.islice(itertools.count(), 3000):
        quarantine.note_loss(str(number))
    assert quarantine.left_s("0") == 0
    assert quarantine.left_s("2999") == 50


def test_a_worker_may_be_lost_for_ever(time: Time) -> None:
    quarantine = Quarantine(losses=3, window_s=60, pause_s=5)
    for _ in range(1100):
        time.now_s += quarantine.note_loss("worker")
    assert quarantine.note_loss("worker") == 60
