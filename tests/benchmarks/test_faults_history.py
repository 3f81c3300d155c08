"""The checker of histories: what holds passes, and every way to break the invariant is found, by its name."""

from dataclasses import replace

import pytest
from benchmarks.faults.history import (
    Broken,
    ChoiceWanted,
    End,
    Ended,
    Event,
    Fault,
    History,
    ToldDelta,
    check_all,
    violations_of,
)

WANTED = [
    ChoiceWanted(token_ids=(5, 6, 7, 8, 9), text="a bé c", finish_reason="length"),
    ChoiceWanted(token_ids=(1, 2), text="xy", finish_reason="stop"),
]
FIRST = ToldDelta(index=0, offset=0, token_ids=(5, 6), text="a b", text_offset=0)
OTHER = ToldDelta(index=1, offset=0, token_ids=(1, 2), text="xy", text_offset=0)
SECOND = ToldDelta(index=0, offset=2, token_ids=(7,), text="", text_offset=3)
# é has two bytes: offsets of text are of bytes.
THIRD = ToldDelta(index=0, offset=3, token_ids=(8, 9), text="é c", text_offset=3)
FINISHED = Ended(end=End.FINISHED, finish_reasons=("length", "stop"), token_counts=(5, 2))
GOOD: list[Event] = [FIRST, OTHER, Broken(reason="a coordinator died"), SECOND, THIRD, FINISHED]


def faults(*events: Event) -> set[Fault]:
    history = History(name="request 1", script="script 1", client="wire", events=list(events))
    return {violation.fault for violation in violations_of(history, WANTED)}


def test_a_good_history_passes_with_a_break_in_it_and_cut_off_where_the_client_left():
    assert faults(*GOOD) == set()
    assert faults(FIRST, OTHER, Ended(end=End.CANCELLED)) == set()
    assert faults(Ended(end=End.CANCELLED)) == set()
    assert faults(FIRST, Ended(end=End.REFUSED)) == set()


@pytest.mark.parametrize(
    ("events", "fault"),
    [
        # A delta comes again, in the same stream or after a resume; part of one does.
        ([FIRST, FIRST, OTHER, SECOND, THIRD, FINISHED], Fault.DOUBLED),
        ([FIRST, OTHER, Broken(reason="reset"), FIRST, SECOND, THIRD, FINISHED], Fault.DOUBLED),
        ([FIRST, OTHER, replace(SECOND, offset=1, token_ids=(6, 7)), THIRD, FINISHED], Fault.DOUBLED),
        # Tokens again under offsets that go on as if nothing were.
        ([FIRST, OTHER, SECOND, THIRD, replace(THIRD, offset=5, text="", text_offset=7), FINISHED], Fault.DOUBLED),
        # Text again, with its tokens once.
        ([FIRST, OTHER, replace(SECOND, text="b", text_offset=2), THIRD, FINISHED], Fault.DOUBLED),
        # One is left out: in the middle, at the end, all of a choice, text alone.
        ([FIRST, OTHER, THIRD, FINISHED], Fault.LOST),
        ([FIRST, OTHER, SECOND, FINISHED], Fault.LOST),
        ([FIRST, SECOND, THIRD, FINISHED], Fault.LOST),
        ([FIRST, OTHER, SECOND, replace(THIRD, text="é"), FINISHED], Fault.LOST),
        # One left out, and the offsets moved up over the gap.
        ([FIRST, OTHER, replace(THIRD, offset=2, text_offset=3), FINISHED], Fault.CHANGED),
        # Another token, another text, another choice's, a choice that was not asked for.
        ([replace(FIRST, token_ids=(5, 4)), OTHER, SECOND, THIRD, FINISHED], Fault.CHANGED),
        ([FIRST, OTHER, SECOND, replace(THIRD, text="è c"), FINISHED], Fault.CHANGED),
        ([FIRST, replace(OTHER, token_ids=(5, 6)), SECOND, THIRD, FINISHED], Fault.CHANGED),
        ([*GOOD[:-1], replace(OTHER, index=2), FINISHED], Fault.CHANGED),
        # What was told before the client left counts as well.
        ([replace(FIRST, token_ids=(5, 4)), Ended(end=End.CANCELLED)], Fault.CHANGED),
        # The end: missing, double, in two kinds, not the last, another one, another count.
        (GOOD[:-1], Fault.NO_END),
        ([], Fault.NO_END),
        ([*GOOD, FINISHED], Fault.TWO_ENDS),
        ([*GOOD, Ended(end=End.FAILED)], Fault.TWO_ENDS),
        ([*GOOD[:-2], FINISHED, THIRD], Fault.AFTER_END),
        ([*GOOD, Broken(reason="reset")], Fault.AFTER_END),
        ([*GOOD[:-1], replace(FINISHED, finish_reasons=("stop", "stop"))], Fault.WRONG_END),
        ([*GOOD[:-1], replace(FINISHED, token_counts=(4, 2))], Fault.WRONG_END),
        ([FIRST, Ended(end=End.FAILED, detail="UNAVAILABLE")], Fault.WRONG_END),
    ],
)
def test_every_break_of_the_invariant_is_found(events, fault):
    assert fault in faults(*events)


def test_each_history_is_held_against_its_own_script_and_reports_name_it():
    good = History(name="request 1", script="script 1", client="wire", events=list(GOOD))
    swapped = History(name="request 2", script="script 2", client="library, sync", events=list(GOOD))
    (violation,) = check_all([good], {"script 1": [WANTED[1], WANTED[0]]})[:1]
    assert violation.fault is Fault.CHANGED
    wanted = {"script 1": WANTED, "script 2": [replace(WANTED[0], token_ids=(5, 6, 7, 8, 10)), WANTED[1]]}
    (violation,) = check_all([good, swapped], wanted)
    assert str(violation) == ("request 2 (library, sync, script 2): changed: choice 0: token 4 is 9, 10 without faults")


def test_silence_is_the_longest_gap_that_touches_a_time():
    deltas = [replace(FIRST, at_s=at_s) for at_s in (1.0, 2.0, 7.0, 8.0)]
    history = History(name="request 1", script="script 1", client="wire", began_s=0.5, events=list(deltas))
    assert history.longest_silence_s(0.0, 1.5) == pytest.approx(1.0)
    assert history.longest_silence_s(3.0, 4.0) == pytest.approx(5.0)
    assert history.longest_silence_s(7.5, 7.6) == pytest.approx(1.0)
    assert history.longest_silence_s(9.0, 10.0) == 0.0
