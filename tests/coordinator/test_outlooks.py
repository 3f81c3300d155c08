"""What growth is expected: whose, since when, and worth what."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from outrider.coordinator.draft_peer import DraftPeer
from outrider.coordinator.firing import Latency
from outrider.coordinator.forest import Forest
from outrider.coordinator.generation import Generation
from outrider.coordinator.group import Group
from outrider.coordinator.growth_arrival import take_growth
from outrider.coordinator.messages import GenerationRequest, GrowthBatch, SpeculationMode
from outrider.coordinator.outlooks import outlooks
from outrider.coordinator.session import Session
from outrider.coordinator.text_stream import TextStream
from outrider.coordinator.totals import Totals
from outrider.growth_source import GrowthSource
from outrider.sampling import SamplingSpec
from outrider.v1 import registry_pb2

MS = 1_000_000


class Bench:
    """Sessions at a lane where every session's next level is worth its number."""

    def __init__(self) -> None:
        self.forest, self.sessions = Forest(), []
        self.drafts: dict[str, DraftPeer] = {}
        self.widths: list[float] = []

    def draft(self, name: str, *, last_ms: float, source: GrowthSource = GrowthSource.MODEL) -> DraftPeer:
        link: Any = SimpleNamespace(step_latency=Latency())
        link.step_latency.observe(1 * MS)
        peer = DraftPeer(worker_id=name, link=link, limits=registry_pb2.WorkerLimits(), sources=frozenset({source}))
        peer.last_growth_ns = round(last_ms * MS)
        peer.response.observe(2 * MS)
        self.drafts[name] = peer
        return peer

    def session(self, *names: str, committed_ms: float = 0, unanswered: int = 0, **options: Any) -> Session:
        request = GenerationRequest(
            request_id="a", prompt_token_ids=(9, 1), sampling=SamplingSpec(max_new_tokens=50), **options
        )
        generation = Generation(request, max_buffered_events=10, release=lambda generation: None)
        session = Session(len(self.sessions) + 1, generation, 0, TextStream(None), self.forest)
        for name in names:
            session.join_draft(name, self.drafts[name].number, 1)
        session.committed_ns = round(committed_ms * MS)
        self.forest.rows.unanswered[session.row] = unanswered
        self.sessions.append(session)
        return session

    def leaf_values(self, group: Group, *, widths: Any, by_model: Any) -> Any:
        self.widths = list(widths)
        return SimpleNamespace(
            values=np.array([float(own.session_id) for own in group.sessions]), has_tree=np.ones(len(group), dtype=bool)
        )

    def found(self, now_ms: float = 10) -> list[tuple[float, float, float]]:
        """(since when, how long it takes, value) of each outlook."""
        trees: Any = self
        expected = outlooks(trees, Group(self.sessions), self.drafts, round(now_ms * MS))
        return sorted((own.forecast.since_ns / MS, own.forecast.latency.mean_ns / MS, own.value) for own in expected)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_sessions_of_one_draft_and_time_are_one_outlook(bench):
    bench.draft("a", last_ms=9.5)
    bench.draft("b", last_ms=9.0)
    for names in (("a",), ("a",), ("b",)):
        bench.session(*names)
    assert bench.found() == [(9.0, 1.0, 3.0), (9.5, 1.0, 3.0)]
    assert bench.widths == [8.0] * 3


def test_an_answer_to_the_commit_comes_later_than_the_next_step(bench):
    bench.draft("a", last_ms=9.5)
    bench.session("a", committed_ms=9.8, unanswered=1)
    assert bench.found() == [(9.8, 2.0, 1.0)]
    # What has just become the root is expanded by the step that the draft is in; not where that is overdue.
    bench.forest.rows.was_drafted[bench.sessions[0].row] = True
    assert bench.found() == [(9.5, 1.0, 1.0)]
    assert bench.found(now_ms=90) == [(9.8, 2.0, 1.0)]


def test_a_draft_that_is_silent_is_asked_seldom(bench):
    bench.draft("a", last_ms=9.5)
    for unanswered in (2, 8, 9):
        bench.session("a", committed_ms=unanswered, unanswered=unanswered)
    assert bench.found() == [(8.0, 2.0, 2.0)]


def test_nothing_is_expected_without_a_draft(bench):
    assert bench.session() is bench.sessions[0]
    assert bench.found() == []
    bench.draft("a", last_ms=9.5)
    bench.session("a", mode=SpeculationMode.OFF)
    bench.session("a", mode=SpeculationMode.SYNC)
    assert bench.found() == []


def test_of_several_drafts_the_model_that_spoke_last_speaks_next(bench):
    bench.draft("trie", last_ms=9.9, source=GrowthSource.NGRAM)
    bench.draft("a", last_ms=9.1)
    bench.draft("b", last_ms=9.4)
    session = bench.session("trie", "a", "b")
    assert bench.found() == [(9.4, 1.0, 1.0)]
    session.leave_draft("b")
    assert bench.found() == [(9.1, 1.0, 1.0)]
    session.leave_draft("a")
    # A trie that has answered has nothing more to say.
    assert bench.found() == []


def told(
    session: Session, *, source: GrowthSource, nodes: int, complete: bool = False, is_step: bool = True
) -> GrowthBatch:
    return GrowthBatch(
        session_ids=[session.session_id],
        epochs=[1],
        as_of=[len(session.token_ids)],
        node_counts=[nodes],
        complete=[complete],
        node_ids=np.arange(1, nodes + 1),
        parents=np.zeros(nodes, dtype=np.int64),
        tokens=np.arange(nodes),
        acceptance=np.full(nodes, 0.2),
        sources=np.full(nodes, int(source)) if nodes and source is not GrowthSource.MODEL else None,
        is_step=is_step,
    )


def test_a_model_that_rests_while_its_trie_leads_is_not_waited_for_and_teaches_nothing(bench):
    peer = bench.draft("a", last_ms=9)
    session = bench.session("a", unanswered=1)
    rows, sessions, totals = bench.forest.rows, {session.session_id: session}, Totals()
    take: Any = partial(take_growth, peer, sessions=sessions, drafts=bench.drafts, totals=totals)
    # More may come from the model.
    take(told(session, source=GrowthSource.NGRAM, nodes=3))
    assert rows.unanswered[session.row] == 1
    take(told(session, source=GrowthSource.NGRAM, nodes=3, complete=True))
    assert rows.unanswered[session.row] == 0
    # Nor has a model answered where a trie says that it has nothing new.
    rows.unanswered[session.row] = 1
    take(told(session, source=GrowthSource.NGRAM, nodes=0, complete=True, is_step=False))
    assert rows.unanswered[session.row] == 0
    assert (peer.last_growth_ns, totals.demand.draft_steps) == (9 * MS, 0)
    rows.unanswered[session.row] = 1
    take(told(session, source=GrowthSource.MODEL, nodes=2))
    assert rows.unanswered[session.row] == 0
    assert peer.last_growth_ns > 9 * MS
