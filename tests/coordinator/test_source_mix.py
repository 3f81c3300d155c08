"""Nodes of several sources in one tree: whose they are, what they count, and how their estimates are corrected."""

import random
from collections.abc import Sequence

import numpy as np
import pytest

from outrider.coordinator.candidates import candidates
from outrider.coordinator.forest import Forest
from outrider.coordinator.messages import Growth, GrowthBatch, SourceCounts
from outrider.coordinator.mirror import Moves, TreeMirror, graft, move_roots
from outrider.coordinator.open_leaves import open_leaves
from outrider.coordinator.source_mix import NO_COUNTS, Kind, by_source
from outrider.growth_source import GrowthSource

MODEL, NGRAM, EAGLE = GrowthSource
Node = tuple[int, int, int, float]


class Tree:
    """One session's mirror, and what several workers say of it."""

    def __init__(self, forest: Forest | None = None, kind: Kind = Kind.GREEDY) -> None:
        self.token_ids = [9]
        self.forest = forest or Forest()
        self.mirror = TreeMirror(self.forest, self.token_ids, kind)
        self.node_id = 0

    def grow(self, source: GrowthSource, nodes: Sequence[Node]) -> None:
        """Each node's id, parent's id, token and estimate; a worker a source."""
        node_ids, parents, tokens, acceptance = zip(*nodes, strict=True)
        growth = Growth(
            session_id=1,
            epoch=1,
            as_of=len(self.token_ids),
            node_ids=node_ids,
            parents=parents,
            tokens=tokens,
            acceptance=acceptance,
            sources=[source] * len(nodes) if source is not MODEL else (),
        )
        graft(source.word, GrowthBatch.of([growth]), [self.mirror])

    def guess(self, source: GrowthSource, token: int, estimate: float) -> None:
        """A child of the root."""
        self.node_id += 1
        self.grow(source, [(self.node_id, 0, token, estimate)])

    def slots(self) -> list[int]:
        return candidates([self.mirror], most=[99], deepest=[99]).slots.tolist()

    def value(self, token: int) -> float:
        (slot,) = [slot for slot in self.slots() if self.forest.token[slot] == token]
        return float(self.forest.value[slot])

    def commit(self, *tokens: int) -> None:
        self.token_ids += tokens
        moves = Moves(
            rows=np.array([self.mirror.row]),
            counts=np.array([len(tokens)]),
            tokens=np.array(tokens),
            accepted=np.array([0]),
            slots=np.zeros(0, dtype=np.int64),
            keeps_tree=np.array([True]),
        )
        move_roots(self.forest, moves)

    def shift(self, source: GrowthSource) -> float:
        return self.forest.mix.shift(self.mirror.row)[source]


def test_a_model_alone_costs_nothing_and_is_credited_with_everything():
    tree = Tree()
    tree.guess(MODEL, 5, 0.5)
    assert not tree.forest.mix.is_active
    assert tree.value(5) == 0.5
    tree.commit(5)
    assert by_source((7, 3, 2), tree.mirror.source_counts) == [SourceCounts(MODEL, 7, 3, 2)]
    assert by_source((0, 0, 0), NO_COUNTS) == []


def test_a_node_of_several_sources_is_one_node_and_counts_for_each():
    tree = Tree()
    tree.guess(MODEL, 5, 0.5)
    tree.guess(NGRAM, 5, 0.75)
    tree.guess(NGRAM, 6, 0.125)
    tree.guess(EAGLE, 6, 0.0625)
    tree.guess(MODEL, 7, 0.25)
    slots = tree.slots()
    assert len(slots) == 3
    assert [tree.value(token) for token in (5, 6, 7)] == pytest.approx([0.75, 0.125, 0.25])
    by_token = {int(tree.forest.token[slot]): slot for slot in slots}
    # The model's first node came before anything was noted of sources.
    tree.forest.mix.note_round(tree.forest, np.array(slots), np.array([by_token[5]]))
    counted = by_source((5, 3, 1), tree.mirror.source_counts)
    assert counted == [SourceCounts(MODEL, 2, 2, 1), SourceCounts(NGRAM, 2, 2, 1), SourceCounts(EAGLE, 1, 1, 0)]
    tree.mirror.close()
    assert by_source((5, 3, 1), tree.mirror.source_counts) == counted
    assert by_source((5, 3, 1), tree.forest.mix.totals) == counted


def test_a_slot_that_is_used_again_is_nobodys():
    tree = Tree()
    for token in range(10):
        tree.guess(NGRAM, token, 0.5)
    old = tree.slots()
    tree.commit(99)
    other = Tree(tree.forest)
    for token in range(80):
        other.guess(EAGLE, token, 0.25)
    again = np.array(sorted({*old} & {*other.slots()}))
    assert len(again)
    other.forest.mix.note_round(other.forest, again, again[:0])
    assert by_source((80, len(again), 0), other.mirror.source_counts) == [SourceCounts(EAGLE, 80, len(again), 0)]


def test_growth_that_is_committed_already_counts_for_its_source():
    tree = Tree()
    tree.guess(NGRAM, 5, 0.5)
    tree.commit(5, 6)
    node = Growth(
        session_id=1, epoch=1, as_of=1, node_ids=[8], parents=[1], tokens=[6], acceptance=[0.5], sources=[NGRAM]
    )
    assert graft(NGRAM.word, GrowthBatch.of([node]), [tree.mirror]) == [1]
    assert by_source((2, 0, 0), tree.mirror.source_counts) == [SourceCounts(NGRAM, 2, 0, 0)]


def play(tree: Tree, *, rounds: int, sources: dict[GrowthSource, tuple[float, float]], seed: int = 0) -> None:
    """Rounds of one token; each source guesses its own first token: how often it is right, and what it says."""
    chance = random.Random(seed)
    for _ in range(rounds):
        right = chance.randrange(1000, 2000)
        for source, (truth, claim) in sources.items():
            tree.guess(source, right if chance.random() < truth else 10 * source, claim)
        tree.commit(right)


def test_who_overrates_itself_is_weighed_down_and_who_underrates_itself_up():
    tree = Tree()
    play(tree, rounds=300, sources={MODEL: (0.7, 0.7), NGRAM: (0.1, 0.9), EAGLE: (0.6, 0.1)})
    assert abs(tree.shift(MODEL)) < 0.7
    assert tree.shift(NGRAM) < -2
    assert tree.shift(EAGLE) > 1
    tree.guess(MODEL, 1, 0.7)
    tree.guess(NGRAM, 2, 0.9)
    tree.guess(EAGLE, 3, 0.1)
    assert [tree.value(token) for token in (1, 2, 3)] == pytest.approx([0.7, 0.1, 0.6], abs=0.15)
    # A certainty can be corrected too.
    other = Tree()
    play(other, rounds=60, sources={NGRAM: (0.0, 1.0)})
    other.guess(NGRAM, 2, 1.0)
    assert other.value(2) < 0.2


def test_a_new_session_begins_with_what_others_of_its_kind_have_shown():
    forest = Forest()
    for number in range(4):
        play(Tree(forest, Kind.COUPLED), rounds=50, sources={NGRAM: (0.1, 0.9)}, seed=number)
    assert Tree(forest, Kind.COUPLED).shift(NGRAM) < -2
    assert Tree(forest, Kind.GREEDY).shift(NGRAM) == 0
    # What one session shows is its own.
    good = Tree(forest, Kind.COUPLED)
    play(good, rounds=60, sources={NGRAM: (1.0, 0.9)})
    assert good.shift(NGRAM) > 0 > Tree(forest, Kind.COUPLED).shift(NGRAM)


def test_waiting_is_for_what_the_model_would_add():
    tree = Tree()
    tree.guess(NGRAM, 5, 0.75)
    found = candidates([tree.mirror], most=[99], deepest=[99])
    leaves = open_leaves(found, [True])
    # The model begins anew below the root, and three quarters of what may come there are known.
    assert leaves.root_shares == pytest.approx([0.25])
    assert not len(leaves.values)
    tree.grow(MODEL, [(1, 0, 5, 0.5), (2, 0, 6, 0.25), (3, 1, 7, 0.5)])
    tree.grow(NGRAM, [(2, 0, 6, 0.125), (3, 2, 8, 0.4)])
    leaves = open_leaves(candidates([tree.mirror], most=[99], deepest=[99]), [True])
    assert leaves.root_shares == pytest.approx([0.0])
    # The model's leaves: 5-7 (a leaf of all), and 6, of whose children the trie knows one.
    shares = dict(zip(leaves.values.round(4).tolist(), leaves.shares.round(4).tolist(), strict=True))
    assert shares == pytest.approx({0.375: 1.0, 0.25: 0.6})
    # Where no model is waited for, leaves are what nothing hangs from.
    plain = open_leaves(candidates([tree.mirror], most=[99], deepest=[99]), [False])
    assert plain.root_shares == pytest.approx([0.0])
    assert sorted(plain.values.round(4).tolist()) == pytest.approx([0.1, 0.375])
