"""What is sent below a running step's trees, and what of it is left once the step's outcome is known."""

import itertools
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path as FilePath
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.coordinator.committing import Commitment, commit_together

from outrider.coordinator.candidates import Candidates, group_candidates
from outrider.coordinator.forest import Forest
from outrider.coordinator.generation import Generation
from outrider.coordinator.group import Group
from outrider.coordinator.messages import GenerationRequest, Growth, GrowthBatch, SessionVerdict
from outrider.coordinator.mirror import TreeMirror, graft
from outrider.coordinator.rounds import Flight
from outrider.coordinator.session import Session
from outrider.coordinator.successor import Successor, succeed
from outrider.coordinator.successor_kernels import number_new
from outrider.coordinator.text_stream import TextStream
from outrider.coordinator.trees import Tree
from outrider.sampling import SamplingSpec
from outrider.succession import Addition, Survivors, extended, surviving_columns

SESSIONS, BRANCHES = 3, (5, 6, 7)
Path = tuple[int, ...]
ENDED: Any = object()


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
            self.grow(session)

    def grow(self, session: Session) -> None:
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

    def grow_on(self, successor: Successor, flight: Flight, times: int) -> list[Addition]:
        """Trees grow so many times, some sessions' each time; what was sent of it."""
        sent = []
        for _ in range(times):
            for session in self.sessions:
                if not session.is_finished and self.random.random() < 0.7:
                    self.grow(session)
            sent.append(successor.grow(flight))
        return [more for more in sent if more is not None]

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
    bench.grow(late)
    bench.group = Group([*bench.sessions, late])
    successor = bench.follow(flight)
    assert successor.succession.is_in_step.tolist() == [True, True, False]
    own = bench.forest.row[successor.grown(0)[1]]
    assert set(own.tolist()) <= {session.row for session in bench.sessions}
    # Numbers go from 0 to the last of the session's own nodes, whatever its slots were before.
    place = np.repeat(np.arange(3), successor.succession.counts)
    most = successor.succession.verified + successor.succession.counts
    assert (successor.succession.parents < most[place]).all()


def found_by_target(successor: Successor, more: Sequence[Addition], ends: Any, tokens: Any) -> Survivors:
    """From what was sent alone."""
    sent, _ = extended(successor.succession, more)
    return surviving_columns(sent, ends, tokens)


def check_trees(bench: Bench, successor: Successor, more: Sequence[Addition], outcome: Any, **bounds: int) -> None:
    """With each number of additions, what is verified is what the target finds, in slots that hang there."""
    max_nodes, max_depth = bounds.get("max_nodes", 6), bounds.get("max_depth", 4)
    ends, tokens = outcome
    for additions in range(len(more) + 1):
        trees = successor.trees(bench.forest, ends, tokens, additions)
        found = found_by_target(successor, more[:additions], ends, tokens)
        assert list(trees.counts) == found.counts.tolist()
        assert list(trees.parents) == found.parents.tolist()
        assert trees.values.tolist() == bench.forest.value[trees.slots].tolist()
        for session, tree in zip(bench.sessions, trees, strict=True):
            verified = bench.paths(tree)
            assert verified.items() <= bench.known(session).items()
            assert len(verified) <= max_nodes
            assert max(map(len, verified), default=0) <= max_depth


@pytest.mark.parametrize("seed", range(40))
def test_growth_that_comes_behind_it_is_verified_as_well(seed, monkeypatch):
    monkeypatch.setattr("outrider.coordinator.successor._MOST_SENT", 10_000)
    bench = Bench(seed)
    flight = bench.send()
    successor = bench.follow(flight)
    more = bench.grow_on(successor, flight, 4)
    assert more == successor.additions
    assert more
    outcome = successor.outcomes(bench.verify(flight))
    check_trees(bench, successor, more, outcome)
    # With all of it, nothing is missing.
    for session, tree in zip(bench.sessions, successor.trees(bench.forest, *outcome, len(more)), strict=True):
        assert len(tree.tokens) == min(6, sum(len(path) <= 4 for path in bench.known(session)))


def test_nothing_is_sent_twice_nor_above_what_its_parent_was_worth(monkeypatch):
    monkeypatch.setattr("outrider.coordinator.successor._MOST_SENT", 10_000)
    risen = 0
    for seed in range(20):
        bench = Bench(seed)
        flight = bench.send()
        successor = bench.follow(flight)
        more = bench.grow_on(successor, flight, 3)
        sent, slots = successor.grown(len(more))
        verified = {
            slot for own in successor.succession.verified.tolist() for slot in flight.trees.slots[:own].tolist()
        }
        assert len(set(slots.tolist())) == len(slots)
        assert not verified & set(slots.tolist())
        assert sent.values.dtype == np.float32
        first = 0
        for place, count in enumerate(sent.counts.tolist()):
            own, behind = slice(first, first + count), int(sent.verified[place])
            for number, (parent, value, slot) in enumerate(
                zip(sent.parents[own].tolist(), sent.values[own].tolist(), slots[own].tolist(), strict=True)
            ):
                assert parent <= behind + number
                if parent > behind:
                    above = float(sent.values[own][parent - behind - 1])
                    assert value <= above
                    risen += bool(np.float32(bench.forest.value[slot]) > above)
            first += count
    # Estimates of some parents have risen since, or nothing would have been shown.
    assert risen > 5


def test_a_forest_that_is_enlarged_meanwhile_forgets_nothing(monkeypatch):
    monkeypatch.setattr("outrider.coordinator.successor._MOST_SENT", 10_000)
    bench = Bench(1)
    flight = bench.send()
    successor = bench.follow(flight)
    size, more = len(bench.forest.row), []
    while len(bench.forest.row) == size or len(more) < 3:
        more += bench.grow_on(successor, flight, 1)
    _, slots = successor.grown(len(more))
    assert max(slots) >= size
    assert len(set(slots.tolist())) == len(slots)
    check_trees(bench, successor, more, successor.outcomes(bench.verify(flight)))


@pytest.mark.parametrize("end", ["cancelled", "another flight", None])
def test_sessions_that_have_ended_get_nothing_more(end):
    got = 0
    for seed in range(10):
        bench = Bench(seed)
        flight = bench.send()
        successor = bench.follow(flight)
        if end == "cancelled":
            bench.sessions[1].result = ENDED
        elif end == "another flight":
            bench.sessions[1].flight = None
        for session in (*bench.sessions, *bench.sessions):
            bench.grow(session)
        more = successor.grow(flight)
        assert more is not None
        assert more.counts.sum() == len(more.tokens) > 0
        got += more.counts[1]
    assert (got > 0) == (end is None)


def test_a_slot_that_another_session_takes_meanwhile_is_no_known_node(monkeypatch):
    """A session ends while the step runs, and another one of the same batch grows where its nodes stood."""
    monkeypatch.setattr("outrider.coordinator.successor._MOST_SENT", 10_000)
    taken = 0
    for seed in range(20):
        bench = Bench(seed)
        flight = bench.send()
        successor = bench.follow(flight)
        gone = bench.sessions[0]
        own = slice(0, int(successor.succession.counts[0]))
        freed = {*successor.grown(0)[1][own].tolist(), *flight.trees.slots[: flight.trees.counts[0]].tolist()}
        gone.result = ENDED
        gone.close()
        bench.sessions = bench.sessions[1:]
        more = bench.grow_on(successor, flight, 3)
        assert all(each.counts[0] == 0 for each in more)
        _, slots = successor.grown(len(more))
        of_others = slots[np.repeat(np.arange(SESSIONS), successor.grown(len(more))[0].counts) > 0]
        taken += len(freed & set(of_others.tolist()))
        trees = [flight.trees[place] for place in (1, 2)]
        emitted = [bench.outcome(session, tree) for session, tree in zip(bench.sessions, trees, strict=True)]
        ends, tokens = np.full(SESSIONS, -1), np.full(SESSIONS, -1)
        for place, (session, tree, (accepted, token_ids)) in enumerate(
            zip(bench.sessions, trees, emitted, strict=True), start=1
        ):
            ends[place], tokens[place] = accepted[-1] if accepted else 0, token_ids[-1]
            session.token_ids.extend(token_ids)
            assert isinstance(session.mirror, TreeMirror)
            commit_together(Commitment(session.mirror, token_ids, [tree.slots[number - 1] for number in accepted]))
        for additions in range(len(more) + 1):
            found = list(successor.trees(bench.forest, ends, tokens, additions))
            assert not found[0].tokens
            for session, tree in zip(bench.sessions, found[1:], strict=True):
                assert bench.paths(tree).items() <= bench.known(session).items()
    assert taken > 10


def test_growth_that_is_there_already_is_not_sent_again():
    bench = Bench(6)
    flight = bench.send()
    successor = bench.follow(flight)
    assert successor.grow(flight) is None
    assert not successor.additions


def test_where_nothing_may_be_verified_nothing_is_added():
    bench = Bench(6)
    flight = bench.send()
    successor = bench.follow(flight, max_tree_nodes=0)
    for session in bench.sessions:
        bench.grow(session)
    assert successor.grow(flight) is None


def plain_numbers(
    columns: Any, found: Candidates, known: dict[int, int], before: tuple[Any, Any], most: int
) -> tuple[list[int], list[tuple[int, int, int]]]:
    """`number_new`, session by session; `known`: numbers of slots; `before`: nodes verified, and sent."""
    slots, (behind, sent) = found.slots, before
    new = [slot for slot in slots.tolist() if slot not in known]
    floor = sorted((columns.value[slot] for slot in new), reverse=True)[most - 1] if len(new) > most else 0.0
    has_children, numbers, counts, nodes = {int(columns.parent[slot]) for slot in new}, dict(known), [], []
    for place, (first, end) in enumerate(itertools.pairwise(found.starts.tolist())):
        own = len(nodes)
        for slot in slots[first:end].tolist():
            above = int(columns.parent[slot])
            is_root = columns.depth[above] == 0
            is_there = is_root or above in numbers
            is_of_use = slot in has_children or numbers.get(above, 0) > behind[place]
            if slot in known or len(nodes) == most or columns.value[slot] < floor or not is_there or not is_of_use:
                continue
            numbers[slot] = int(behind[place] + sent[place]) + len(nodes) - own + 1
            nodes.append((slot, int(columns.token[slot]), 0 if is_root else numbers[above]))
        counts.append(len(nodes) - own)
    return counts, nodes


def as_memoryviews(columns: Any) -> Any:
    return columns._make(map(memoryview, columns))


@pytest.mark.parametrize("kind", ["as it is called", "plain Python", "plain Python over memoryviews"])
@pytest.mark.parametrize("most", [1, 2, 7, 30, 1000])
def test_new_nodes_are_numbered_as_by_a_plain_loop(kind, most):
    number_all = number_new if kind == "as it is called" else getattr(number_new, "py_func", number_new)
    cut = 0
    for seed in range(10):
        bench = Bench(seed)
        size = len(bench.forest.row)
        number, serial = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
        value = np.ones(size, dtype=np.float32)
        behind = np.array([bench.random.randint(0, 3) for _ in range(SESSIONS)])
        sent, known, first = np.zeros(SESSIONS, dtype=np.int64), {}, group_candidates(bench.group, 64)
        for place, own in enumerate(behind.tolist()):
            best = first.slots[first.starts[place] : first.starts[place + 1]].tolist()[:own]
            behind[place] = len(best)
            known |= {slot: rank for rank, slot in enumerate(best, start=1)}
        for slot, own in known.items():
            number[slot], serial[slot] = own, bench.forest.serial[slot]
        for most_now in (most, 1000):
            found = group_candidates(bench.group, 64)
            columns = bench.forest.columns(0)
            taken = as_memoryviews(columns) if "memoryviews" in kind else columns
            expected = plain_numbers(columns, found, known, (behind, sent), most_now)
            got = number_all(taken, found.starts, found.slots, number, serial, value, behind, sent, most_now)
            counts, slots, tokens, parents, values = got
            assert (
                counts.tolist(),
                list(zip(slots.tolist(), tokens.tolist(), parents.tolist(), strict=True)),
            ) == expected
            assert values.dtype == np.float32
            assert values.tolist() == [float(np.float32(columns.value[slot])) for slot in slots.tolist()]
            assert len(slots) <= most_now
            known |= {slot: int(number[slot]) for slot in slots.tolist()}
            assert all(serial[slot] == bench.forest.serial[slot] and value[slot] > 0 for slot in slots.tolist())
            sent += counts
            cut += most_now == most and len(slots) == most
    assert cut or most >= 30


def test_of_more_than_may_be_sent_the_best_are(monkeypatch):
    """And what is left out may come with the next ones."""
    monkeypatch.setattr("outrider.coordinator.successor._MOST_SENT_TOGETHER", 4)
    bench = Bench(7, max_nodes=20)
    flight = bench.send()
    successor = bench.follow(flight)
    more = bench.grow_on(successor, flight, 5)
    assert more
    assert len(successor.succession.tokens) <= 4
    assert all(len(each.tokens) <= 4 for each in more)
    check_trees(bench, successor, more, successor.outcomes(bench.verify(flight)), max_nodes=20)


def described(seed: int) -> list[Any]:
    """A successor with additions, and what is verified of it, in plain numbers."""
    bench = Bench(seed)
    flight = bench.send()
    successor = bench.follow(flight)
    more = bench.grow_on(successor, flight, 3)
    columns = [[column.tolist() for column in each] for each in more]
    outcome = successor.outcomes(bench.verify(flight))
    check_trees(bench, successor, more, outcome)
    return [columns, *(column.tolist() for column in successor.trees(bench.forest, *outcome, len(more)).slots[:, None])]


def test_without_numba_the_same_is_sent_and_found():
    """In a process that has none."""
    code = (
        "import sys; sys.modules['numba'] = None\n"
        "sys.path[:0] = sys.argv[1:]\n"
        "from outrider.compiled import IS_COMPILED\n"
        "from tests.coordinator.test_successor import described\n"
        "assert not IS_COMPILED\n"
        "print([described(seed) for seed in range(6)])"
    )
    root = str(FilePath(__file__).parents[2])
    done = subprocess.run([sys.executable, "-c", code, root], capture_output=True, text=True, timeout=200, check=True)
    assert done.stdout.strip() == str([described(seed) for seed in range(6)])
