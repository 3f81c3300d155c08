import gc
import weakref

import pytest

from outrider.roles import collector


class Knot:
    """Refers to itself: only the collector frees it."""

    def __init__(self) -> None:
        self.own = self


@pytest.fixture(autouse=True)
def _as_it_was():
    thresholds = gc.get_threshold()
    # Python's own: a test before may have served.
    gc.set_threshold(700, 10, 10)
    gc.disable()
    yield
    gc.set_threshold(*thresholds)
    gc.enable()


def knot_and_many(count: int = 2_000) -> tuple["weakref.ref[Knot]", list[list[int]]]:
    return weakref.ref(Knot()), [[number] for number in range(count)]


def test_a_process_that_serves_is_collected_between_rounds():
    collector.begin_serving()
    knot, held = knot_and_many()
    assert knot() is not None
    collector.between_rounds()
    assert knot() is None
    assert len(held) == 2_000


def test_little_is_left_for_later():
    collector.begin_serving()
    knot, _ = knot_and_many(10)
    collector.between_rounds()
    assert knot() is not None


def test_a_process_that_does_not_serve_is_left_alone():
    knot, held = knot_and_many()
    collector.between_rounds()
    assert knot() is not None
    assert held


def test_what_has_got_older_is_collected_in_the_end():
    collector.begin_serving()
    knot = Knot()
    found = weakref.ref(knot)
    for _ in range(3):
        gc.collect(1)
    # It is of the oldest generation now.
    del knot
    gc.collect(1)
    assert found() is not None
    rounds = 0
    while found() is not None:
        held = [[number] for number in range(2_000)]
        collector.between_rounds()
        del held
        rounds += 1
        assert rounds < 2_000
    assert rounds > 100
