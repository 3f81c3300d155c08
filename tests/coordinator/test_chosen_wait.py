"""What of a batch's delay was chosen, and what was not."""

from outrider.coordinator.chosen_wait import ChosenWait

MS = 1_000_000


def test_a_batch_that_is_not_held_has_no_wait():
    wait = ChosenWait()
    assert wait.end(5 * MS) == 0


def test_the_wait_ends_when_the_batch_was_due_however_late_the_timer_is():
    wait = ChosenWait()
    wait.hold(10 * MS, 0.003)
    assert wait.end(17 * MS) == 3 * MS
    assert wait.end(20 * MS) == 0


def test_a_batch_that_is_decided_on_early_has_waited_until_then():
    wait = ChosenWait()
    wait.hold(10 * MS, 0.003)
    assert wait.end(11 * MS) == MS


def test_whoever_asks_again_goes_on_with_one_wait():
    wait = ChosenWait()
    wait.hold(10 * MS, 0.003)
    wait.hold(12 * MS, 0.004)
    assert wait.end(18 * MS) == 6 * MS


def test_a_wait_without_an_end_is_over_when_there_is_something_to_send():
    wait = ChosenWait()
    wait.hold(10 * MS, float("inf"))
    assert wait.end(14 * MS) == 4 * MS
