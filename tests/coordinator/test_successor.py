"""What is sent below a running step's trees, and what of it is left once the step's outcome is known."""

import itertools
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.coordinator.committing import Commitment, commit_together

from outrider.coordinator.candidates import group_candidates
from outrider.coordinator.forest import Forest
from outrider.coordinator.generation import Generation
from outrider.coordinator.group import Group
from outrider.coordinator.messages import GenerationRequest, Growth, GrowthBatch, SessionVerdict
from outrider.coordinator.mirror import TreeMirror, graft
from outrider.coordinator.rounds import Flight
from outrider.coordinator.session import Session
from outrider.coordinator.successor import Successor, succeed
from outrider.coordinator.text_stream import TextStream
from outrider.coordinator.trees import Tree
from outrider.sampling import SamplingSpec

SESSIONS, BRANCHES = 3, (5, 6, 7)
Path = tuple[int, ...]


class Bench:
    """Sessions of one forest, with random trees and a batch of them on its way."""

    def __init__(self, seed: int, *, max_nodes: int = 6, max_depth: int = 4, max_new_tokens: int = 100) -> None:
        self.random = random.Random(seed)
        self.forest = Forest()
        request = GenerationRequest(
            request_id="one",
            prompt_token_ids=(1, 2),
            sampling=SamplingSpec(max_new_tokens=max_new_tokens),
            max_nodes=max_nodes,
            max_depth=max_depth,
        )
        generation = Generation(request, max_buffered_events=8, release=lambda _: None)
        self.sessions = [Session(n, generation, 0, TextStream(None), self.forest) for n in range(SESSIONS)]
        self.group = Group(self.sessions)
        self._ids = itertools.count(1)
        for session in self.sessions:
            session.join_draft("draft", 1, 1)
            self._grow(session)

    def _grow(self, session: Session) -> None:
        columns: list[tuple[int, int, int, float]] = []
        level = [0]
        for _ in range(6):
            children = []
            for parent in level:
                for token in self.random.sample(BRANCHES, self.random.choice((0, 1, 2, 3))):
                    columns.append((next(self._ids), parent, token, self.random.choice((0.2, 0.5, 0.9))))
                    children.append(columns[-1][0])
            level = children
        if columns:
            node_ids, parents, tokens, acceptance = zip(*columns, strict=True)
            growth = Growth(
                session_id=session.session_id,
                epoch=1,
                as_of=2,
                node_ids=node_ids,
                parents=parents,
                tokens=tokens,
                acceptance=acceptance,
            )
            graft("draft", GrowthBatch.of([growth]), [session.mirror])

    def send(self) -> Flight:
        """Some of each session's best nodes, in a batch."""
        found = group_candidates(self.group, 64)
        counts = [self.random.randint(0, int(own)) for own in np.diff(found.starts)]
        future: Any = SimpleNamespace()
        flight = Flight(
            sessions=self.sessions,
            group=self.group,
            trees=found.trees(counts),
            rows=1,
            submitted_ns=1,
            is_alone=True,
            result=future,
        )
        for session in self.sessions:
            session.flight = flight
        return flight

    def follow(self, flight: Flight, **bounds: Any) -> Successor:
        defaults = {"max_tree_nodes": 64, "max_total_nodes": 1000, "least_value": 0.0}
        return succeed(flight, self.group, **{**defaults, **bounds})

    def outcome(self, session: Session, tree: Tree) -> tuple[list[int], list[int]]:
        """Accepted nodes and emitted tokens: some path of the tree, and a token that is not below its end there."""
        numbers = {pair: number for number, pair in enumerate(zip(tree.parents, tree.tokens, strict=True), start=1)}
        accepted, emitted = [], []
        while True:
            end = accepted[-1] if accepted else 0
            token = self.random.choice((*BRANCHES, 8))
            emitted.append(token)
            if (number := numbers.get((end, token))) is None:
                return accepted, emitted
            accepted.append(number)

    def verify(self, flight: Flight) -> list[SessionVerdict]:
        """Each session's outcome, committed."""
        verdicts = []
        for place, session in enumerate(self.sessions):
            accepted, emitted = self.outcome(session, flight.trees[place])
            verdicts.append(SessionVerdict(session.session_id, 0, accepted_nodes=accepted, token_ids=emitted))
            session.token_ids.extend(emitted)
            slots = [flight.trees[place].slots[number - 1] for number in accepted]
            assert isinstance(session.mirror, TreeMirror)
            commit_together(Commitment(session.mirror, emitted, slots))
        return verdicts

    def paths(self, tree: Tree) -> dict[Path, int]:
        """Slots of a tree's nodes by their tokens from the root."""
        found: list[Path] = [()]
        for token, parent in zip(tree.tokens, tree.parents, strict=True):
            found.append((*found[parent], token))
        assert len(set(found)) == len(found)
        return dict(zip(found[1:], tree.slots, strict=True))

    def known(self, session: Session) -> dict[Path, int]:
        """The same of all that hangs below the session's root."""
        assert isinstance(session.mirror, TreeMirror)
        forest, root = self.forest, int(self.forest.root[session.row])
        found = {}
        for slot in np.flatnonzero((forest.row == session.row) & (forest.depth > 0)).tolist():
            path, at = [], slot
            while at != root:
                path.append(int(forest.token[at]))
                at = int(forest.parent[at])
            found[tuple(reversed(path))] = slot
        return found


@pytest.mark.parametrize("seed", range(60))
def test_what_is_verified_next_hangs_below_the_emitted_tokens(seed, monkeypatch):
    monkeypatch.setattr("outrider.coordinator.successor._MOST_SENT", 1000)
    bench = Bench(seed)
    flight = bench.send()
    successor = bench.follow(flight)
    trees = successor.trees(bench.forest, *successor.outcomes(bench.verify(flight)))
    for session, tree in zip(bench.sessions, trees, strict=True):
        known, verified = bench.known(session), bench.paths(tree)
        assert verified.items() <= known.items()
        # Nothing is cut here but by the request's bounds, and what is kept are the best.
        assert len(verified) == min(6, sum(len(path) <= 4 for path in known))
        best = group_candidates(Group([session]), 64)
        assert sorted(tree.values) == pytest.approx(sorted(best.values.tolist()))


def test_bounds_are_kept():
    for seed in range(30):
        bench = Bench(seed, max_nodes=4, max_depth=2, max_new_tokens=6)
        flight = bench.send()
        successor = bench.follow(flight, max_total_nodes=5)
        lengths = [len(session.token_ids) for session in bench.sessions]
        assert successor.lengths == lengths
        trees = successor.trees(bench.forest, *successor.outcomes(bench.verify(flight)))
        assert sum(trees.counts) <= 5
        for session, tree in zip(bench.sessions, trees, strict=True):
            depths = [len(path) for path in bench.paths(tree)]
            assert len(depths) <= 4
            # None past the last output token.
            assert max(depths, default=0) <= min(2, max(0, session.end - 1 - len(session.token_ids)))


def test_a_session_that_got_nothing_goes_on_without_a_tree():
    bench = Bench(3)
    flight = bench.send()
    successor = bench.follow(flight)
    verdicts = bench.verify(flight)[1:]
    trees = successor.trees(bench.forest, *successor.outcomes(verdicts))
    assert trees.counts[0] == 0


def test_who_was_not_in_the_step_begins_with_its_root():
    bench = Bench(4)
    flight = bench.send()
    bench.sessions[1].flight = None
    successor = bench.follow(flight)
    assert successor.succession.is_in_step.tolist() == [True, False, True]
    assert successor.succession.counts[1] == 0


def test_slots_of_a_session_that_has_ended_may_be_anothers():
    bench = Bench(5)
    flight = bench.send()
    gone = bench.sessions.pop(0)
    gone.close()
    # What grows now may stand where the ended session's nodes stood.
    generation = gone.generation
    late = Session(9, generation, 0, TextStream(None), bench.forest)
    late.join_draft("draft", 1, 1)
    bench._grow(late)
    bench.group = Group([*bench.sessions, late])
    successor = bench.follow(flight)
    assert successor.succession.is_in_step.tolist() == [True, True, False]
    own = bench.forest.row[successor.grown(0)[1]]
    assert set(own.tolist()) <= {session.row for session in bench.sessions}
    # Numbers go from 0 to the last of the session's own nodes, whatever its slots were before.
    place = np.repeat(np.arange(3), successor.succession.counts)
    most = successor.succession.verified + successor.succession.counts
    assert (successor.succession.parents < most[place]).all()
