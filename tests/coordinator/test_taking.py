"""What sessions and their clients have of a step's verdicts, be these taken as a whole or with care."""

from dataclasses import replace

import pytest
from tests.coordinator.test_commits import REQUEST, Bench, accepted
from tests.coordinator.test_text_stream import BYTE_LEVEL

from outrider.coordinator.commits import commit_trees, take_tokens, whole_answer
from outrider.coordinator.messages import (
    FinishReason,
    RoundRecord,
    SessionVerdict,
    SpeculationMode,
    TokenDelta,
    TokenLogprobs,
)
from outrider.coordinator.metrics_counts import ServingCounts
from outrider.coordinator.session import Session
from outrider.coordinator.text_stream import TextStream


def logprobs(*values: float) -> TokenLogprobs:
    return TokenLogprobs(token_logprobs=values, top_token_ids=[[]] * len(values), top_logprobs=[[]] * len(values))


def told(session: Session) -> TokenDelta:
    """The one delta that its client has got."""
    session.deliver()
    (delta,) = (event for event in session.generation._events if isinstance(event, TokenDelta))
    return delta


@pytest.mark.parametrize("is_alone", [False, True])
def test_log_probabilities_and_cached_tokens_are_those_of_the_session(is_alone):
    bench = Bench()
    others = [] if is_alone else [bench.add(), bench.add(replace(REQUEST, trace=True))]
    asked = bench.add()
    plain = [accepted(session, [1], [11, 22]) for session in others]
    own = accepted(asked, [], [30])._replace(logprobs=logprobs(-0.5), cached_tokens=2)
    bench.step([*plain, own])
    assert told(asked).logprobs == logprobs(-0.5)
    assert asked.cached_tokens == 2
    assert [(told(session).logprobs, session.cached_tokens) for session in others] == [(None, 0)] * len(others)
    # What the first target had is what counts.
    bench.step([accepted(session, [], [40])._replace(cached_tokens=9) for session in bench.sessions], sent=0)
    assert (asked.cached_tokens, *(session.cached_tokens for session in others)) == (2, *[0] * len(others))


def test_what_a_stop_string_cuts_off_counts_nowhere():
    bench = Bench()
    stop = BYTE_LEVEL.decode([11])
    whole, cut = bench.add(), bench.add(replace(REQUEST, stop=(stop,)), TextStream(BYTE_LEVEL, stop=(stop,)))
    verdicts = [accepted(session, [1, 2], [11, 21, 30]) for session in (whole, cut)]
    committed = bench.step([own._replace(logprobs=logprobs(-1.0, -2.0, -3.0)) for own in verdicts])
    assert (committed.emitted.tolist(), committed.accepted.tolist()) == ([3, 1], [2, 1])
    assert cut.result is not None
    assert (cut.result.finish_reason, cut.result.completion_tokens) == (FinishReason.STOP, 1)
    for session, count in ((whole, 3), (cut, 1)):
        delta = told(session)
        assert (list(delta.token_ids), delta.logprobs) == ([11, 21, 30][:count], logprobs(-1.0, -2.0, -3.0).head(count))
    counts = [(own.verify_steps, own.drafted_tokens, own.accepted_tokens) for own in (whole, cut)]
    assert counts == [(1, 2, 2), (1, 2, 1)]


def ends(session: Session) -> SessionVerdict:
    return accepted(session, [], [2])


def goes_on(session: Session) -> SessionVerdict:
    return accepted(session, [1], [11, 22])


@pytest.mark.parametrize(
    ("request_", "verdict", "waits", "is_on"),
    [
        (REQUEST, goes_on, True, True),
        (REQUEST, ends, False, False),
        (replace(REQUEST, sampling=replace(REQUEST.sampling, max_new_tokens=2)), goes_on, False, False),
        (replace(REQUEST, trace=True), goes_on, False, True),
        (replace(REQUEST, mode=SpeculationMode.SYNC), goes_on, False, True),
    ],
)
def test_tokens_wait_for_the_batch_only_where_nobody_asks_for_them(request_, verdict, waits, is_on):
    bench = Bench()
    sessions = [bench.add(), bench.add(request_)]
    step = bench.answer([goes_on(sessions[0]), verdict(sessions[1])])
    answered = whole_answer(step)
    assert answered is not None
    committed = commit_trees(step, answered)
    assert committed.is_on.tolist() == [True, is_on]
    # Trees have moved all the same, and the next batch may be chosen.
    assert sessions[0].rows.length[sessions[0].row] == 4
    assert all(session.flight is None for session in sessions)
    assert [len(session.token_ids) > 2 for session in sessions] == [False, not waits]
    take_tokens(committed)
    assert [session.token_ids[2:] for session in sessions] == [list(own) for own in committed.token_ids]
    counts = [(own.verify_steps, own.drafted_tokens, own.cached_tokens) for own in sessions]
    assert counts == [(1, 2, 0)] * 2
    assert list(told(sessions[0]).token_ids) == [11, 22]


def test_a_trace_has_the_tree_and_what_it_was_held_for():
    bench = Bench()
    plain, traced = bench.add(), bench.add(replace(REQUEST, trace=True))
    step = bench.step([accepted(plain, [], [30]), accepted(traced, [1], [11, 22])]).step
    step.flight.held_ns, step.flight.waited_ns = 7, 3
    for session in (plain, traced):
        session.deliver()
    assert not any(isinstance(event, RoundRecord) for event in plain.generation._events)
    (record,) = (event for event in traced.generation._events if isinstance(event, RoundRecord))
    assert (list(record.node_tokens), list(record.node_parents)) == ([11, 21], [0, 1])
    assert (list(record.accepted_nodes), list(record.emitted_token_ids)) == ([1], [11, 22])
    assert (record.held_ns, record.waited_ns) == (7, 3)


def test_a_round_is_bare_where_a_tree_could_have_been():
    bench, counts = Bench(), ServingCounts()
    short = replace(REQUEST, sampling=replace(REQUEST.sampling, max_new_tokens=2))
    drafted, undrafted = bench.add(), bench.add()
    undrafted.leave_draft("one")
    bench.add(replace(REQUEST, mode=SpeculationMode.OFF))
    last = bench.add(short)
    bench.step([accepted(last, [], [3])], sent=0)
    committed = bench.step([accepted(session, [], [30]) for session in bench.sessions], sent=0)
    # Counted when the next batch has left: by then all may have more tokens.
    drafted.token_ids += [31] * 47
    counts.note_round(committed)
    assert (counts.bare_drafted, counts.bare_undrafted) == (1, 1)
    bench.sessions.clear()
    counts.note_round(bench.step([accepted(bench.add(), [1], [11, 30])]))
    assert (counts.bare_drafted, counts.bare_undrafted) == (1, 1)
