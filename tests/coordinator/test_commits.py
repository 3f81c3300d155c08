"""What a step's result does to many sessions at once is what it does to each of them alone."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from outrider.coordinator.commits import Answered, Committed, commit, tell_drafts, whole_answer
from outrider.coordinator.forest import Forest
from outrider.coordinator.generation import Generation
from outrider.coordinator.group import Group
from outrider.coordinator.messages import (
    ChoiceResult,
    Commits,
    FaultKind,
    FinishReason,
    GenerationRequest,
    Growth,
    GrowthBatch,
    SessionFault,
    SessionVerdict,
    SpeculationMode,
    VerifyResult,
)
from outrider.coordinator.mirror import graft
from outrider.coordinator.rounds import Flight, Step
from outrider.coordinator.session import Session
from outrider.coordinator.text_stream import TextStream
from outrider.coordinator.trees import Tree, Trees
from outrider.coordinator.verdicts import Verdicts
from outrider.sampling import SamplingSpec

REQUEST = GenerationRequest(
    request_id="a", prompt_token_ids=(9, 1), sampling=SamplingSpec(max_new_tokens=50, stop_token_ids=(2,))
)
NS = 5_000


class Draft:
    """Takes commits."""

    def __init__(self, number: int) -> None:
        self.number, self.link = number, self
        self.told: list[tuple[int, ...]] = []

    def commit(self, commits: Commits) -> None:
        self.told += [(own.session_id, own.epoch, own.position, *own.token_ids) for own in commits]


class Bench:
    """Sessions with a tree of two levels each: 11, 12 below the root, 21, 22 below 11."""

    def __init__(self) -> None:
        self.forest = Forest()
        self.sessions: list[Session] = []
        self.drafts: Any = {"one": Draft(1), "two": Draft(2)}

    def add(self, request: GenerationRequest = REQUEST, text_stream: TextStream | None = None) -> Session:
        generation = Generation(request, max_buffered_events=10, release=lambda generation: None)
        session = Session(len(self.sessions) + 1, generation, 0, text_stream or TextStream(None), self.forest)
        generation.sessions.append(session)
        if request.mode is not SpeculationMode.OFF:
            session.join_draft("one", 1, 7)
            growth = Growth(
                session_id=session.session_id,
                epoch=7,
                as_of=2,
                node_ids=[1, 2, 3, 4],
                parents=[0, 0, 1, 1],
                tokens=[11, 12, 21, 22],
                acceptance=[0.9, 0.1, 0.8, 0.2],
            )
            graft("one", GrowthBatch.of([growth]), [session.mirror])
        self.sessions.append(session)
        return session

    def step(self, verdicts: Sequence[SessionVerdict], *, sent: int = 2) -> Committed:
        """Each session's two best nodes were sent (11 and 21), or none."""
        step = self.answer(verdicts, sent=sent)
        by_id = {session.session_id: place for place, session in enumerate(self.sessions)}
        places = [by_id[verdict.session_id] for verdict in verdicts]
        answered = Answered(np.array(places), [self.sessions[place] for place in places], Verdicts.of(verdicts))
        return commit(step, answered)

    def answer(self, verdicts: Sequence[SessionVerdict], *, sent: int = 2) -> Step:
        """The same, with its result not taken yet."""
        group = Group(self.sessions)
        trees = []
        for session in self.sessions:
            slots = self._slots(session)[:sent]
            trees.append(Tree(slots, [11, 21][: len(slots)], [0, 1][: len(slots)], [0.9, 0.72][: len(slots)]))
        future: Any = SimpleNamespace()
        flight = Flight(
            sessions=self.sessions,
            group=group,
            trees=Trees.of(trees),
            rows=3 * len(trees),
            submitted_ns=1,
            is_alone=True,
            result=future,
        )
        for session in self.sessions:
            session.flight = flight
        result = VerifyResult(step=1, verdicts=verdicts, step_ns=1, forward_ns=1, step_tokens=3)
        return Step(flight, result, NS)

    def _slots(self, session: Session) -> list[int]:
        forest = self.forest
        return [
            slot
            for token in (11, 21)
            for slot in range(len(forest.row))
            if forest.row[slot] == session.row and forest.depth[slot] and forest.token[slot] == token
        ]

    def tokens_of(self, session: Session) -> set[int]:
        """Of its tree's nodes."""
        forest = self.forest
        return {int(forest.token[slot]) for slot in range(len(forest.row)) if self._is_node(session, slot)}

    def _is_node(self, session: Session, slot: int) -> bool:
        return bool(self.forest.row[slot] == session.row and self.forest.depth[slot])


def accepted(session: Session, nodes: Sequence[int], tokens: Sequence[int]) -> SessionVerdict:
    return SessionVerdict(session.session_id, 0, accepted_nodes=nodes, token_ids=tokens)


@pytest.mark.parametrize("is_turned", [False, True])
def test_each_session_goes_its_own_way(is_turned):
    bench = Bench()
    whole, half, missed, stopped = (bench.add() for _ in range(4))
    off = bench.add(replace(REQUEST, mode=SpeculationMode.OFF))
    sync = bench.add(replace(REQUEST, mode=SpeculationMode.SYNC))
    verdicts = [
        accepted(whole, [1, 2], [11, 21, 30]),
        accepted(half, [1], [11, 22]),
        accepted(missed, [], [40]),
        accepted(stopped, [1], [11, 2]),
        accepted(off, [], [50]),
        accepted(sync, [1], [11]),
    ]
    committed = bench.step(verdicts[::-1] if is_turned else verdicts)
    assert [session.token_ids[2:] for session in bench.sessions] == [list(own.token_ids) for own in verdicts]
    found = dict(zip((own.session_id for own in committed.sessions), committed.emitted.tolist(), strict=True))
    assert found == {1: 3, 2: 2, 3: 1, 4: 2, 5: 1, 6: 1}
    assert [session.flight for session in bench.sessions] == [None] * 6
    # 22 had a node that was not sent; whoever ended moves no tree, and sync begins anew.
    assert [session.mirror.length for session in (whole, half, missed, sync)] == [5, 4, 3, 3]
    assert [session.mirror.root_was_drafted for session in (whole, half, missed, sync)] == [False, True, False, True]
    assert [session.mirror.root_was_missed for session in (whole, half, missed)] == [False, False, True]
    assert [bench.tokens_of(session) for session in (whole, half, missed, sync)] == [set()] * 4
    order = [own.session_id for own in committed.sessions]
    assert committed.is_on[order.index(4)] == False  # noqa: E712 - numpy's own
    assert int(committed.is_on.sum()) == 5
    assert stopped.result is not None
    assert bench.forest.rows.length[off.row] == 3
    assert {session.committed_ns for session in bench.sessions} == {NS}


def test_what_hangs_below_the_accepted_node_stays():
    bench = Bench()
    session = bench.add()
    bench.step([accepted(session, [], [11])], sent=0)
    assert session.mirror.root_was_drafted
    assert bench.tokens_of(session) == {21, 22}


def test_drafts_hear_of_those_that_go_on():
    bench = Bench()
    alone, both, ended = bench.add(), bench.add(), bench.add()
    both.join_draft("two", 2, 8)
    tell_drafts(
        bench.step(
            [accepted(alone, [1], [11, 30]), accepted(both, [], [31]), accepted(ended, [], [2])],
        ),
        bench.drafts,
    )
    assert sorted(bench.drafts["one"].told) == [(1, 7, 2, 11, 30), (2, 7, 2, 31)]
    assert bench.drafts["two"].told == [(2, 8, 2, 31)]
    assert [session.unanswered_commits for session in bench.sessions] == [1, 1, 0]
    alone.leave_draft("one")
    both.leave_draft("one")
    for draft in bench.drafts.values():
        draft.told.clear()
    bench.sessions.remove(ended)
    tell_drafts(bench.step([accepted(alone, [], [32]), accepted(both, [], [33])]), bench.drafts)
    assert bench.drafts["one"].told == []
    assert bench.drafts["two"].told == [(2, 8, 3, 33)]


def test_a_result_without_tokens_changes_nothing():
    bench = Bench()
    session = bench.add()
    committed = bench.step([])
    tell_drafts(committed, bench.drafts)
    assert (len(committed.sessions), int(committed.emitted.sum())) == (0, 0)
    assert bench.drafts["one"].told == []
    assert session.flight is not None


def test_an_answer_is_whole_where_every_session_that_was_sent_has_tokens():
    bench = Bench()
    sessions = [bench.add() for _ in range(3)]
    verdicts = [accepted(session, [1], [11, 22]) for session in sessions]
    step = bench.answer(verdicts)
    whole = whole_answer(step)
    assert whole is not None
    assert (whole.places.tolist(), list(whole.sessions), list(whole.verdicts)) == ([0, 1, 2], sessions, verdicts)
    counts = {session.session_id: 2 for session in sessions}
    assert whole_answer(step._replace(result=replace(step.result, verified=counts))) is not None


@pytest.mark.parametrize(
    "what", ["left out", "twice", "deferred", "fault", "another epoch", "another batch", "ended", "closed", "verified"]
)
def test_an_answer_in_which_one_session_differs_is_looked_at_session_by_session(what):
    bench = Bench()
    sessions = [bench.add() for _ in range(3)]
    first, *others = [accepted(session, [1], [11, 22]) for session in sessions]
    changed = {
        "left out": [],
        "twice": [first, first],
        "deferred": [first._replace(deferred=True)],
        "fault": [first._replace(fault=SessionFault(kind=FaultKind.LOST, message="gone"))],
        "another epoch": [first._replace(epoch=7)],
    }
    step = bench.answer([*changed.get(what, [first]), *others])
    if what == "another batch":
        sessions[0].flight = None
    elif what == "ended":
        sessions[0].result = ChoiceResult(index=0, finish_reason=FinishReason.STOP, completion_tokens=1)
    elif what == "closed":
        sessions[0].generation.is_closed = True
    elif what == "verified":
        counts = {session.session_id: 2 - (session is sessions[0]) for session in sessions}
        step = step._replace(result=replace(step.result, verified=counts))
    assert whole_answer(step) is None
