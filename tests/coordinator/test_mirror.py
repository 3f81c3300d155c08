import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from tests.coordinator.committing import Commitment, commit_together

from outrider.coordinator.candidates import Candidates, candidates
from outrider.coordinator.chain_mirror import ChainMirror
from outrider.coordinator.forest import Forest
from outrider.coordinator.messages import Growth, GrowthBatch
from outrider.coordinator.mirror import Mirror, TreeMirror, graft
from outrider.draft_distribution import WEIGHT_SUM, DraftDistribution

Path = tuple[int, ...]


def make_growth(as_of, nodes, *, complete=False, acceptance=0.5) -> Growth:
    node_ids, parents, tokens = zip(*nodes, strict=True)
    return Growth(
        session_id=1,
        epoch=1,
        as_of=as_of,
        node_ids=node_ids,
        parents=parents,
        tokens=tokens,
        acceptance=[acceptance] * len(nodes),
        complete=complete,
    )


class Bench:
    """One session's mirror."""

    def __init__(self, token_ids: Sequence[int], *, is_chain: bool = False, forest: Forest | None = None) -> None:
        self.token_ids = list(token_ids)
        self.forest = forest or Forest()
        self.mirror: Mirror = ChainMirror(self.token_ids) if is_chain else TreeMirror(self.forest, self.token_ids)

    def graft(self, worker_id: str, growth: Growth) -> int:
        return graft(worker_id, GrowthBatch.of([growth]), [self.mirror])[0]

    def commit(self, new: Sequence[int], *, accepted: Sequence[int] = (), keeps_tree: bool = True) -> None:
        self.token_ids.extend(new)
        if isinstance(self.mirror, ChainMirror):
            self.mirror.commit(new, keeps_chain=keeps_tree)
        else:
            commit_together(Commitment(self.mirror, new, accepted, keeps_tree))

    def best(self, most: int = 1000, deepest: int = 1000) -> Candidates:
        return candidates([self.mirror], most=[most], deepest=[deepest])

    def values(self) -> dict[Path, float]:
        """Of every node, by its path from the root."""
        best = self.best()
        (tree,) = best.trees([len(best.values)])
        paths: list[Path] = [()]
        for token, parent in zip(tree.tokens, tree.parents, strict=True):
            paths.append((*paths[parent], token))
        assert len(set(paths)) == len(paths)
        assert best.depths.tolist() == [len(path) for path in paths[1:]]
        return dict(zip(paths[1:], tree.values, strict=True))

    def paths(self) -> set[Path]:
        return set(self.values())


def test_growth_of_two_workers_merges_by_parent_and_token():
    bench = Bench([9])
    assert bench.graft("a", make_growth(1, [(1, 0, 5), (2, 1, 6)])) == 2
    assert bench.graft("b", make_growth(1, [(1, 0, 5), (2, 1, 7)])) == 2
    assert bench.paths() == {(5,), (5, 6), (5, 7)}
    # Both workers' ids go on meaning the same node.
    assert bench.graft("a", make_growth(1, [(3, 1, 8)])) == 1
    assert bench.graft("b", make_growth(1, [(4, 1, 8)])) == 1
    assert bench.paths() == {(5,), (5, 6), (5, 7), (5, 8)}


def test_a_node_keeps_the_highest_estimate_and_hands_it_down():
    bench = Bench([9])
    bench.graft("a", make_growth(1, [(1, 0, 5), (2, 1, 6), (3, 2, 7)], acceptance=0.5))
    bench.graft("b", make_growth(1, [(1, 0, 5), (2, 0, 4)], acceptance=0.8))
    bench.graft("b", make_growth(1, [(3, 1, 6)], acceptance=0.1))
    assert bench.values() == pytest.approx({(5,): 0.8, (4,): 0.8, (5, 6): 0.4, (5, 6, 7): 0.2})
    bench.graft("a", replace(make_growth(1, [(4, 0, 4), (5, 0, 4)]), acceptance=[0.9, 0.1]))
    assert bench.values()[(4,)] == pytest.approx(0.9)


def test_the_same_growth_twice_changes_nothing():
    bench = Bench([9])
    growth = make_growth(1, [(1, 0, 5), (2, 0, 4), (3, 1, 5)])
    bench.graft("a", growth)
    before = bench.values()
    assert bench.graft("a", growth) == 0
    assert bench.graft("a", make_growth(1, [(4, 0, 5), (5, 0, 5)])) == 2
    assert bench.graft("b", growth) == 3
    assert bench.values() == before


def test_late_growth_finds_its_place_or_is_dropped():
    bench = Bench([9])
    bench.graft("a", make_growth(1, [(1, 0, 5), (2, 0, 4)]))
    bench.commit([5, 6])
    late = make_growth(1, [(3, 1, 6), (4, 3, 7), (5, 1, 8), (6, 2, 1), (7, 4, 1)])
    assert bench.graft("a", late) == 3
    assert bench.paths() == {(7,), (7, 1)}
    # Ids of committed nodes serve until as_of has passed them.
    assert bench.graft("a", make_growth(1, [(8, 3, 2)])) == 1
    assert bench.paths() == {(7,), (7, 1), (2,)}
    assert bench.graft("a", make_growth(3, [(9, 0, 3)])) == 1
    bench.commit([2])
    assert bench.graft("a", make_growth(3, [(10, 8, 4), (11, 9, 4)])) == 1


def test_growth_for_the_root_at_an_older_length():
    bench = Bench([9])
    bench.commit([5])
    assert bench.graft("a", make_growth(1, [(1, 0, 5), (2, 0, 6), (3, 1, 7)])) == 2
    assert bench.paths() == {(7,)}


def test_growth_from_the_future_is_dropped():
    bench = Bench([9])
    assert bench.graft("a", make_growth(2, [(1, 0, 5)])) == 0
    assert not bench.paths()


def test_complete_holds_for_its_round_only():
    bench = Bench([9])
    bench.graft("a", make_growth(1, [(1, 0, 5), (2, 1, 6)], complete=True))
    assert bench.mirror.is_complete
    bench.commit([5], keeps_tree=False)
    assert not bench.mirror.is_complete
    assert not bench.paths()
    assert bench.graft("a", make_growth(2, [(3, 0, 6)], complete=True)) == 1
    assert bench.mirror.is_complete
    assert bench.paths() == {(6,)}


def test_a_worker_that_starts_anew_may_use_its_ids_again():
    bench = Bench([9])
    bench.graft("a", make_growth(1, [(1, 0, 5)]))
    bench.mirror.forget_worker("a")
    assert bench.graft("a", make_growth(1, [(2, 1, 6)])) == 0
    assert bench.graft("a", make_growth(1, [(1, 0, 6)])) == 1
    assert bench.paths() == {(5,), (6,)}


def test_what_a_session_held_is_free_for_others():
    forest = Forest()
    first, second = Bench([9], forest=forest), Bench([8], forest=forest)
    for bench in (first, second):
        bench.graft("a", make_growth(1, [(1, 0, 5), (2, 1, 6)]))
    first.mirror.close()
    third = Bench([7, 7], forest=forest)
    assert not third.paths()
    assert third.graft("a", make_growth(2, [(3, 1, 6)])) == 0
    assert third.graft("a", make_growth(2, [(1, 0, 4)])) == 1
    assert third.paths() == {(4,)}
    assert second.paths() == {(5,), (5, 6)}


def test_many_sessions_one_after_the_other_need_no_more_than_one():
    forest = Forest()
    for _ in range(50):
        bench = Bench([9], forest=forest)
        for worker_id in ("a", "b"):
            bench.graft(worker_id, make_growth(1, [(1, 0, 5), (2, 1, 6)]))
        bench.commit([5])
        bench.mirror.close()
    assert not forest.row.any()
    assert (len(forest.root), len(forest.row), forest.node_ids.views) == (2, 65, 4)


@pytest.mark.parametrize(("is_silent", "most"), [(False, 3), (True, 256)])
def test_a_long_session_needs_no_more_slots_than_a_short_one(is_silent, most):
    """Committed nodes are kept as long as growth may name them, and not for ever where the draft has fallen silent."""
    bench = Bench([0])
    for length in range(1, 500):
        if not is_silent or length == 1:
            bench.graft("a", make_growth(length, [(2 * length, 0, 5), (2 * length + 1, 2 * length, 6)]))
        bench.commit([5])
    assert 0 < np.count_nonzero(bench.forest.row) <= most


def test_paths_too_unlikely_for_a_float_do_no_harm():
    bench = Bench([9])
    nodes = [(node, node - 1, node) for node in range(1, 70)]
    bench.graft("a", make_growth(1, nodes, acceptance=0.0))
    bench.graft("a", make_growth(1, [(70, 0, 4)]))
    bench.commit(list(range(1, 61)))
    bench.graft("a", make_growth(61, [(71, 0, 5)]))
    values = bench.values()
    assert len(values) == 10
    assert values.pop((5,)) == 0.5
    assert all(0 <= value <= 1e-6 for value in values.values())


def test_no_node_is_worth_more_than_its_parent_however_estimates_rise():
    chance = random.Random(0)
    bench = Bench([9])
    for first in range(1, 400, 20):
        growth = make_growth(1, [(node, 0 if node == first else node - 1, 3) for node in range(first, first + 20)])
        bench.graft("a", replace(growth, acceptance=[chance.choice([chance.random(), 1.0]) for _ in range(20)]))
        drafted = np.flatnonzero(bench.forest.depth)
        assert (bench.forest.value[drafted] <= bench.forest.value[bench.forest.parent[drafted]]).all()


def test_estimates_out_of_range_do_no_harm():
    bench = Bench([9])
    bench.graft("a", make_growth(1, [(1, 0, 5)], acceptance=0.0))
    bench.graft("a", make_growth(1, [(2, 1, 6)], acceptance=float("nan")))
    bench.graft("a", make_growth(1, [(3, 0, 7)], acceptance=3.0))
    bench.graft("a", make_growth(1, [(4, 2, 5)], acceptance=1.0))
    bench.commit([5])
    assert bench.values() == pytest.approx({(6,): 1e-6, (6, 5): 1e-6})


def test_candidates_are_the_best_of_each_session_with_their_parents():
    chance = random.Random(3)
    forest = Forest()
    benches = [Bench([number], forest=forest) for number in range(5)]
    for bench in benches:
        nodes = [(node, chance.randrange(node), node) for node in range(1, 60)]
        for node in nodes:
            bench.graft("a", make_growth(1, [node], acceptance=chance.choice([1.0, chance.random()])))
    order = chance.sample(benches, 5)
    most, deepest = [0, 10, 100, 7, 20], [9, 9, 2, 1, 9]
    found = candidates([bench.mirror for bench in order], most=most, deepest=deepest)
    trees = found.trees(np.diff(found.starts).tolist())
    for place, bench in enumerate(order):
        everything = {path: value for path, value in bench.values().items() if len(path) <= deepest[place]}
        wanted = sorted(everything.values(), reverse=True)[: most[place]]
        assert trees[place].values == pytest.approx(wanted)
        paths: list[Path] = [()]
        for token, parent in zip(trees[place].tokens, trees[place].parents, strict=True):
            paths.append((*paths[parent], token))
        assert [everything[path] for path in paths[1:]] == pytest.approx(wanted)
        own = slice(found.starts[place], found.starts[place + 1])
        leaves = [not any(other[:-1] == path for other in bench.values()) for path in paths[1:]]
        assert found.is_leaf[own].tolist() == leaves
        assert found.depths[own].tolist() == [len(path) for path in paths[1:]]
    heads = found.trees([0, 3, 1, 0, 5])
    assert [len(tree.tokens) for tree in heads] == [0, 3, 1, 0, 5]
    assert heads[1].parents == trees[1].parents[:3]


def test_of_a_very_deep_tree_the_head_is_sent_with_parents_before_children():
    bench = Bench([9])
    # Slots that are used again come in no order.
    for node in range(1, 40):
        bench.graft("a", make_growth(1, [(node, 0, node)]))
    bench.commit([49])
    for node in range(100, 200):
        bench.graft("a", make_growth(2, [(node, node - 1 if node > 100 else 0, 7)], acceptance=1.0))
    best = bench.best()
    (tree,) = best.trees([len(best.values)])
    assert list(tree.parents) == list(range(63))


@pytest.mark.parametrize("seed", range(10))
def test_mirrors_equal_their_drafts_whatever_the_delay(seed):
    """Drafts apply commits late, their growth is delayed, doubled and shared with others': what agrees is there.

    Sessions end and others take their place; drafts begin anew, and use the same ids again.
    """
    chance = random.Random(seed)
    forest = Forest()
    sessions = [_Delayed(chance, forest) for _ in range(3)]
    for _ in range(250):
        if chance.random() < 0.02:
            sessions.pop(0).bench.mirror.close()
            sessions.append(_Delayed(chance, forest))
        for session in sessions:
            session.act()
        if chance.random() < 0.5:
            _deliver(chance, sessions)
        moving = [session for session in sessions if chance.random() < 0.2]
        commit_together(*[session.next_commitment() for session in moving])
        for session in sessions:
            root = tuple(session.bench.token_ids)
            wanted = {
                path[len(root) :]: estimate
                for path, estimate in session.delivered.items()
                if path[: len(root)] == root and len(path) > len(root)
            }
            for path in sorted(wanted, key=len):
                wanted[path] *= wanted.get(path[:-1], 1.0)
            assert session.bench.values() == pytest.approx(wanted)


class _Delayed:
    """A session with two drafts, and what is on its way between them and the mirror."""

    def __init__(self, chance: random.Random, forest: Forest) -> None:
        self.chance = chance
        self.bench = Bench([0], forest=forest)
        self.drafts = {name: _Draft([0]) for name in ("a", "b")}
        self.delivered: dict[Path, float] = {}
        """The highest estimate of each node."""

    def act(self) -> None:
        name = self.chance.choice("ab")
        if self.chance.random() < 0.02:
            self.bench.mirror.forget_worker(name)
            self.drafts[name] = _Draft(self.bench.token_ids)
        draft = self.drafts[name]
        if self.chance.random() < 0.6:
            draft.grow(self.chance)
        elif draft.untold:
            draft.token_ids.extend(draft.untold.pop(0))

    def next_commitment(self) -> Commitment:
        best = self.bench.best(20)
        (tree,) = best.trees([len(best.values)])
        accepted, parent = [], 0
        while (
            children := [n for n, above in enumerate(tree.parents) if above == parent]
        ) and self.chance.random() < 0.6:
            child = self.chance.choice(children)
            accepted.append(child)
            parent = child + 1
        new = [*(tree.tokens[child] for child in accepted), self.chance.randrange(3)]
        self.bench.token_ids.extend(new)
        for draft in self.drafts.values():
            draft.untold.append(new)
        slots = [tree.slots[child] for child in accepted]
        assert isinstance(self.bench.mirror, TreeMirror)
        return Commitment(self.bench.mirror, new, slots)


class _Draft:
    def __init__(self, token_ids: Sequence[int]) -> None:
        self.token_ids = list(token_ids)
        self.untold: list[list[int]] = []
        self.grown: dict[int, Path] = {}
        self.in_flight: list[tuple[Growth, Path]] = []

    def grow(self, chance: random.Random) -> None:
        """Below its root, or below a node of its that is still alive."""
        root = tuple(self.token_ids)
        alive = [number for number, path in self.grown.items() if path[: len(root)] == root and len(path) > len(root)]
        parent = chance.choice([0, *alive])
        path = (*(self.grown[parent] if parent else root), chance.randrange(3))
        if path not in self.grown.values():
            number = len(self.grown) + 1
            self.grown[number] = path
            estimate = chance.choice([1.0, 0.1 + 0.9 * chance.random()])
            growth = make_growth(len(root), [(number, parent, path[-1])], acceptance=estimate)
            self.in_flight.append((growth, path))


def _deliver(chance: random.Random, sessions: Sequence[_Delayed]) -> None:
    """One message of one worker with some growth of several sessions, in order."""
    worker_id = chance.choice("ab")
    growths, mirrors, resent = [], [], []
    for session in sessions:
        draft = session.drafts[worker_id]
        if draft.in_flight:
            growth, path = draft.in_flight.pop(0)
            session.delivered[path] = max(growth.acceptance[0], session.delivered.get(path, 0.0))
            growths.append(growth)
            mirrors.append(session.bench.mirror)
            if chance.random() < 0.2:
                resent.append((growth, session.bench.mirror))
    if growths:
        graft(worker_id, GrowthBatch.of(growths), mirrors)
    for growth, mirror in resent:
        graft(worker_id, GrowthBatch.of([growth]), [mirror])


def make_chain(as_of, nodes, *, with_q=True) -> Growth:
    """Nodes as (id, parent, token); the id is also the q's first token, to tell them apart."""
    growth = make_growth(as_of, nodes)
    distributions = [
        DraftDistribution(np.array([node_id], dtype=np.uint32), np.array([WEIGHT_SUM], dtype=np.uint32))
        for node_id, _, _ in nodes
    ]
    return replace(growth, distributions=distributions if with_q else ())


def q_ids(bench: Bench) -> list[int]:
    """Of the chain's nodes, root to leaf."""
    (tree,) = bench.best().trees([len(bench.best().values)])
    assert list(tree.parents) == list(range(len(tree.tokens)))
    return [int(q.token_ids[0]) for q in tree.distributions]


def test_a_chain_takes_nodes_with_a_q_only():
    bench = Bench([9], is_chain=True)
    assert bench.graft("a", make_chain(1, [(1, 0, 5)], with_q=False)) == 0
    assert bench.graft("a", make_chain(1, [(2, 0, 5), (3, 2, 6)])) == 2
    assert bench.graft("a", make_chain(1, [(4, 3, 6)], with_q=False)) == 0
    assert q_ids(bench) == [2, 3]
    assert bench.best().values == pytest.approx([0.5, 0.25])
    assert bench.best().is_leaf.tolist() == [False, True]


@pytest.mark.parametrize("token", [5, 7])
def test_a_draft_that_begins_anew_replaces_its_chain_whatever_the_token(token):
    bench = Bench([9], is_chain=True)
    bench.graft("a", make_chain(1, [(1, 0, 5), (2, 1, 6), (3, 2, 4)]))
    assert bench.graft("a", make_chain(1, [(4, 0, token), (5, 4, 6)])) == 2
    assert q_ids(bench) == [4, 5]
    # What hung on the old chain has no place any more.
    assert bench.graft("a", make_chain(1, [(6, 3, 8)])) == 0
    assert bench.graft("a", make_chain(1, [(7, 4, 6)])) == 1
    assert q_ids(bench) == [4, 7]


def test_a_chain_survives_a_commit_that_follows_it_and_takes_late_growth():
    bench = Bench([9], is_chain=True)
    bench.graft("a", make_chain(1, [(1, 0, 5), (2, 1, 6), (3, 2, 7)]))
    bench.commit([5, 6])
    assert bench.graft("a", make_chain(1, [(4, 3, 8)])) == 1
    assert q_ids(bench) == [3, 4]
    assert bench.graft("a", make_chain(1, [(3, 2, 7), (4, 3, 8)])) == 0
    assert q_ids(bench) == [3, 4]
    bench.commit([1])
    assert bench.graft("a", make_chain(1, [(5, 4, 8)])) == 0
    assert q_ids(bench) == []
    bench.graft("a", make_chain(4, [(6, 0, 2)]))
    assert q_ids(bench) == [6]


def test_the_chain_goes_with_its_draft():
    bench = Bench([9], is_chain=True)
    bench.graft("a", make_chain(1, [(1, 0, 5), (2, 1, 6)]))
    bench.mirror.forget_worker("a")
    assert q_ids(bench) == []
    bench.graft("b", make_chain(1, [(1, 0, 5)]))
    assert q_ids(bench) == [1]


def test_chains_and_trees_share_a_message_and_a_batch():
    forest = Forest()
    tree, chain = Bench([9], forest=forest), Bench([8], is_chain=True)
    growths = [make_growth(1, [(1, 0, 5), (2, 0, 4)]), make_chain(1, [(1, 0, 5), (2, 1, 6)])]
    mirrors = [tree.mirror, chain.mirror, None]
    batch = GrowthBatch.of([*growths, make_growth(1, [(1, 0, 3)])])
    assert graft("a", batch, mirrors) == [2, 2, 0]
    found = candidates([None, chain.mirror, tree.mirror], most=[9, 9, 9], deepest=[9, 9, 9])
    assert found.starts.tolist() == [0, 0, 2, 4]
    none, chained, grown = found.trees([0, 1, 2])
    assert (none.tokens, chained.tokens, sorted(grown.tokens)) == ([], [5], [4, 5])
    assert [len(tree.distributions) for tree in (none, chained, grown)] == [0, 1, 0]
    tree.commit([4])
    chain.commit([5, 6])
    assert tree.mirror.root_was_drafted
    assert chain.mirror.root_was_drafted
    assert not list(itertools.chain(tree.paths(), q_ids(chain)))
