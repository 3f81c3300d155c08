"""Sessions' guesses: only new ones are sent, within the sessions' bounds, and commits are learned from.

`PlainTree` and `PlainCalibration` say what trees and a calibration are, with a Python object a node; the shared columns
are held to it, with numba and without.
"""

import random
import subprocess
import sys
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider.acceptance_calibration import RELIABILITY_EDGES, RULES
from outrider.draft_worker.guess_tree import GuessBounds, GuessEnds, GuessForest, GuessTree, NewGuesses
from outrider.draft_worker.ngram_calibration import NgramCalibration
from outrider.draft_worker.ngram_tree import GuessColumns, TextTails

WIDTH = 4


def make_tree(**changes: Any) -> tuple[GuessForest, GuessTree]:
    options: dict[str, Any] = {"max_depth": 16, "max_nodes": 64, "last_position": 100}
    forest = GuessForest()
    return forest, forest.plant(10, GuessBounds(**options | changes))


def columns(rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> GuessColumns:
    """As of a trie; shares, counts and contexts are of no account here."""
    most = max(len(tokens) for tokens, _ in rows) + 1
    tokens, parents = np.full((2, len(rows), most), 77, np.int32)
    for row, (own, places) in enumerate(rows):
        tokens[row, : len(own)], parents[row, : len(own)] = own, places
    found = np.array([(len(own), 1) for own, _ in rows], np.int32)
    return GuessColumns(tokens, parents, np.zeros((len(rows), most)), tokens, tokens, found)


def padded(rows: Sequence[Sequence[float]], kind: Any) -> Any:
    most = max(map(len, rows)) + 1
    return np.array([[*row, *[1] * (most - len(row))] for row in rows], kind)


def grafted(
    own: tuple[GuessForest, GuessTree],
    tokens: list[int],
    parents: list[int],
    estimates: list[float] | None = None,
    *,
    buckets: list[int] | None = None,
    min_value: float = 0.0,
    ends: GuessEnds | None = None,
) -> NewGuesses:
    forest, tree = own
    ends = ends or GuessEnds.roots([tree.number], TextTails.of([[]], WIDTH))
    of_each = padded([estimates or [0.5] * len(tokens)], np.float64), padded([buckets or [0] * len(tokens)], np.int64)
    forest.graft(ends, columns([(tokens, parents)]), *of_each, min_value=min_value)
    return forest.send([tree])[0]


def likeliest_end(forest: GuessForest, tree: GuessTree, *, least: float = 0.0) -> GuessEnds:
    return forest.likeliest_ends(GuessEnds.roots([tree.number], TextTails.of([[1, 2, 3]], WIDTH)), least)


CHAIN = ([5, 6, 7], [-1, 0, 1])


def test_a_second_match_sends_only_what_is_new():
    forest, tree = make_tree()
    first = grafted((forest, tree), *CHAIN)
    assert (first.node_ids, first.parents, first.tokens) == ([1, 2, 3], [0, 1, 2], [5, 6, 7])
    again = grafted((forest, tree), [5, 6, 7, 8, 9], [-1, 0, 1, 2, 0])
    assert (again.node_ids, again.parents, again.tokens) == ([4, 5], [3, 1], [8, 9])
    assert tree.size == 5


def test_a_commit_keeps_what_hangs_below_it_and_learns():
    (forest, tree), calibration = make_tree(), NgramCalibration()
    grafted((forest, tree), [5, 6, 7, 9], [-1, 0, 1, -1], [0.6, 0.5, 0.5, 0.3], buckets=[7, 8, 9, 10])
    before = calibration.learned[[7, 8, 9, 10]].tolist()
    tree.commit([5, 6], calibration)
    after = calibration.learned[[7, 8, 9, 10]].tolist()
    # Right, right, not tried, wrong.
    assert after[0] > before[0]
    assert after[1] > before[1]
    assert after[2] == before[2]
    assert after[3] < before[3]
    assert (tree.size, tree.position) == (1, 12)
    new = grafted((forest, tree), [7, 8], [-1, 0])
    # The 7 is there, and its id goes on being its id.
    assert (new.node_ids, new.parents, new.tokens) == ([5], [3], [8])
    tree.commit([1], calibration)
    assert tree.size == 0
    assert grafted((forest, tree), [7], [-1]).parents == [0]


def test_the_likeliest_path_goes_on():
    forest, tree = make_tree(max_depth=5)
    assert not len(likeliest_end(forest, tree))
    sent = grafted((forest, tree), [5, 6, 7, 8], [-1, -1, 1, 1], [0.3, 0.6, 0.2, 0.5])
    assert not len(likeliest_end(forest, tree, least=0.31))
    end = likeliest_end(forest, tree, least=0.3)
    assert (end.trees.tolist(), end.values.tolist(), end.places[0, 1]) == ([tree.number], [0.3], 2)
    # What stands before its children: the text and the path, of which as much as before.
    assert end.texts.tails[0, : end.texts.lengths[0]].tolist() == [2, 3, 6, 8]
    new = grafted((forest, tree), [1, 2, 3, 4], [-1, 0, 1, 2], [0.9] * 4, ends=end)
    # Two tokens are above it, and five levels there may be.
    assert (new.tokens, new.parents[0], new.acceptance[0]) == ([1, 2, 3], sent.node_ids[3], 0.9)
    assert not len(likeliest_end(forest, tree))
    # Values count from the root.
    assert not grafted((forest, tree), [9], [-1], [0.5], min_value=0.2, ends=end).tokens
    forest, final = make_tree(final_tokens=frozenset([7]))
    grafted((forest, final), *CHAIN)
    assert not len(likeliest_end(forest, final))


def test_bounds_of_depth_credit_length_and_ends():
    assert grafted(make_tree(max_depth=2), *CHAIN).tokens == [5, 6]
    assert grafted(make_tree(max_nodes=2), *CHAIN).tokens == [5, 6]
    assert grafted(make_tree(last_position=11), *CHAIN).tokens == [5]
    assert grafted(make_tree(last_position=10), *CHAIN).tokens == []
    assert grafted(make_tree(final_tokens=frozenset([6])), *CHAIN).tokens == [5, 6]
    # Credit comes back with a commit.
    forest, tree = make_tree(max_nodes=2)
    grafted((forest, tree), *CHAIN)
    tree.commit([5], NgramCalibration())
    assert grafted((forest, tree), [6, 7, 8], [-1, 0, 1]).tokens == [7]


def test_unlikely_guesses_are_left_out_with_all_below_them():
    forest, tree = make_tree()
    new = grafted((forest, tree), [1, 2, 3, 4], [-1, -1, 1, 0], [0.5, 0.05, 0.9, 0.1], min_value=0.06)
    assert new.tokens == [1]
    # What was left out once may come later.
    assert grafted((forest, tree), [2], [-1], [0.3], min_value=0.06).tokens == [2]


def test_estimates_of_siblings_do_not_add_up_to_more_than_one():
    own = make_tree()
    assert grafted(own, [1, 2], [-1, -1], [0.7, 0.2]).acceptance == [0.7, 0.2]
    (third,) = grafted(own, [3], [-1], [0.9]).acceptance
    assert abs(third - 0.1) < 1e-9
    assert grafted(own, [4], [-1], [0.9]).acceptance[0] < 1e-9


def test_ids_go_on_after_everything_was_forgotten():
    forest, tree = make_tree()
    grafted((forest, tree), *CHAIN)
    tree.clear()
    assert tree.size == 0
    assert grafted((forest, tree), *CHAIN).node_ids == [4, 5, 6]


@dataclass
class PlainNode:
    """A node, or a root."""

    node_id: int
    acceptance: float = 1.0
    bucket: int = 0
    left: float = 1.0
    children: dict[int, "PlainNode"] = field(default_factory=dict)

    @property
    def best(self) -> int:
        """The token of the likeliest child, of equals the first."""
        return max(self.children, key=lambda token: self.children[token].acceptance)


class PlainCalibration:
    """The estimates of `calibration` as they begin, and what they become."""

    def __init__(self, calibration: NgramCalibration, strength: float = 8.0, decay: float = 0.998) -> None:
        self.learned = calibration.learned.tolist()
        self._prior_hits = [estimate * strength for estimate in self.learned]
        self._strength, self._decay = strength, decay
        self._seen = [(0.0, 0.0)] * len(self.learned)
        self.bins = {rule: [[0, 0.0, 0] for _ in range(len(RELIABILITY_EDGES) + 1)] for rule in RULES}

    def observe(self, node: PlainNode, *, came_true: bool) -> None:
        """Counts one guess after a committed parent."""
        rule = RULES[node.bucket // (len(self.learned) // len(RULES))]
        of_bin = self.bins[rule][bisect_left(RELIABILITY_EDGES, node.acceptance)]
        of_bin[0], of_bin[1], of_bin[2] = of_bin[0] + 1, of_bin[1] + node.acceptance, of_bin[2] + came_true
        hits, trials = self._seen[node.bucket]
        hits, trials = hits * self._decay + came_true, trials * self._decay + 1
        self._seen[node.bucket] = hits, trials
        self.learned[node.bucket] = (self._prior_hits[node.bucket] + hits) / (self._strength + trials)


class PlainTree:
    """A tree of guesses; new nodes are collected in `new`: id, parent, token, estimate."""

    def __init__(self, position: int, bounds: GuessBounds, new_id: Any) -> None:
        self.position, self._bounds, self._new_id = position, bounds, new_id
        self.root, self.size = PlainNode(0), 0
        self.new: list[tuple[int, int, int, float]] = []

    @property
    def depth_limit(self) -> int:
        """The deepest that a node may be."""
        return min(self._bounds.max_depth, self._bounds.last_position - self.position)

    def likeliest_path(self) -> tuple[PlainNode, float, list[int]] | None:
        """The leaf that the best children lead to, the chance of all of them, and their tokens."""
        node, value, tokens = self.root, 1.0, list[int]()
        while node.children:
            tokens.append(node.best)
            node = node.children[node.best]
            value *= node.acceptance
        if not 0 < len(tokens) < self.depth_limit or tokens[-1] in self._bounds.final_tokens:
            return None
        return node, value, tokens

    def reach(self, depth: int) -> float:
        """Nodes that are accepted in the mean along the best children."""
        node, value, nodes = self.root, 1.0, 0.0
        for _ in range(depth):
            if not node.children:
                break
            node = node.children[node.best]
            value *= node.acceptance
            nodes += value
        return nodes

    def graft(self, top: Any, guesses: Sequence[tuple[int, int, float, int]], min_value: float) -> None:
        """Adds what is not there yet of (token, place of the parent, estimate, bucket)."""
        # Of every place: its node (None where there is none), path value and depth.
        places: list[tuple[PlainNode | None, float, int]] = []
        for token, place, estimate, bucket in guesses:
            above, value, depth = (top[0], top[1], len(top[2])) if place < 0 else places[place]
            node: PlainNode | None = None
            ends_here = place >= 0 and guesses[place][0] in self._bounds.final_tokens
            if above is not None and depth < self.depth_limit and not ends_here:
                node = above.children.get(token)
                acceptance = min(estimate, above.left)
                if node is None and self.size < self._bounds.max_nodes and value * acceptance >= min_value:
                    node = above.children[token] = PlainNode(self._new_id(), acceptance, bucket)
                    above.left -= acceptance
                    self.size += 1
                    self.new.append((node.node_id, 0 if above is self.root else above.node_id, token, acceptance))
            places.append((node, 0.0 if node is None else value * node.acceptance, depth + 1))

    def commit(self, token_ids: Sequence[int], calibration: PlainCalibration) -> None:
        """Moves the root."""
        node: PlainNode | None = self.root
        for token in token_ids:
            if node is None:
                break
            for guessed, child in node.children.items():
                calibration.observe(child, came_true=guessed == token)
            node = node.children.get(token)
        self.root = PlainNode(0) if node is None else node
        self.size = sum(1 for _ in _below(self.root))
        self.position += len(token_ids)

    def clear(self) -> None:
        """Forgets every node below the root."""
        self.root, self.size = PlainNode(0), 0


def _below(node: PlainNode) -> Any:
    for child in node.children.values():
        yield child
        yield from _below(child)


class Twins:
    """Trees in a forest, and the same as plain objects; texts are as long as they like."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.forest, self.calibration = GuessForest(), NgramCalibration()
        self.plain_calibration = PlainCalibration(self.calibration)
        self.trees: list[tuple[GuessTree, PlainTree]] = []

    def plant(self) -> None:
        draw = self.random
        bounds = GuessBounds(
            max_depth=draw.choice([1, 4, 9, 20]),
            max_nodes=draw.choice([1, 12, 64, 64, 150]),
            last_position=draw.choice([12, 60, 1000, 1000]),
            final_tokens=frozenset(draw.sample(range(6), draw.choice([0, 0, 1, 3]))),
        )
        start, step = draw.choice([(1, 1), (1, 1), (5, 2)])
        new_id = None if (start, step) == (1, 1) else count(start, step).__next__
        tree = self.forest.plant(10, bounds, new_id=new_id)
        self.trees.append((tree, PlainTree(10, bounds, count(start, step).__next__)))

    def guesses(self, tokens: Sequence[int]) -> list[tuple[int, int, float, int]]:
        """A trie's; some estimates are equal."""
        draw, drawn = self.random, list[tuple[int, int, float, int]]()
        for place in range(draw.choice([0, 4, 12, 20])):
            parent = draw.choice([place - 1, place - 1, draw.randrange(-1, place) if place else -1])
            bucket = draw.randrange(0, len(self.plain_calibration.learned), 101)
            estimate = draw.choice([self.plain_calibration.learned[bucket], 0.5, 0.9])
            drawn.append((draw.choice(tokens), parent, estimate, bucket))
        return drawn

    def look(self, chosen: list[int], *, least: float | None, min_value: float) -> None:
        """Grafts below the roots (`least` None), or below the likeliest leaves, which have to be the same."""
        texts = [[self.random.randrange(6) for _ in range(self.random.choice([1, 3, 9]))] for _ in chosen]
        roots = GuessEnds.roots([self.trees[own][0].number for own in chosen], TextTails.of(texts, WIDTH))
        ends, tops = roots, [(own, (self.trees[own][1].root, 1.0, [])) for own in chosen]
        if least is not None:
            ends = self.forest.likeliest_ends(roots, least)
            paths = [(own, text, self.trees[own][1].likeliest_path()) for own, text in zip(chosen, texts, strict=True)]
            going_on = [(own, text, path) for own, text, path in paths if path is not None and path[1] >= least]
            assert ends.trees.tolist() == [self.trees[own][0].number for own, _, _ in going_on]
            assert ends.values.tolist() == [path[1] for _, _, path in going_on]
            assert ends.places[:, 1].tolist() == [len(path[2]) for _, _, path in going_on]
            for (_, text, path), row, length in zip(going_on, ends.texts.tails, ends.texts.lengths, strict=True):
                assert row[:length].tolist() == [*text[-WIDTH:], *path[2]][-WIDTH:]
            tops = [(own, path) for own, _, path in going_on]
        if not tops:
            return
        # Few tokens: what is guessed is often there already.
        guesses = [self.guesses(range(self.random.choice([2, 6]))) for _ in tops]
        for (own, top), given in zip(tops, guesses, strict=True):
            self.trees[own][1].graft(top, given, min_value)
        found = columns([([guess[0] for guess in given], [guess[1] for guess in given]) for given in guesses])
        estimates = padded([[guess[2] for guess in given] for given in guesses], np.float64)
        buckets = padded([[guess[3] for guess in given] for given in guesses], np.int64)
        self.forest.graft(ends, found, estimates, buckets, min_value=min_value)

    def check_sent(self, chosen: list[int], parts: int) -> None:
        """What was guessed is the same, and so is what is expected of it."""
        texts = TextTails.of([[]] * len(chosen), WIDTH)
        roots = GuessEnds.roots([self.trees[own][0].number for own in chosen], texts)
        depths, reaches = self.forest.reach(roots, parts)
        assert depths == [-(-self.trees[own][1].depth_limit // parts) for own in chosen]
        assert reaches == [self.trees[own][1].reach(depth) for own, depth in zip(chosen, depths, strict=True)]
        for own, new in zip(chosen, self.forest.send([self.trees[own][0] for own in chosen]), strict=True):
            plain = self.trees[own][1]
            assert list(zip(new.node_ids, new.parents, new.tokens, new.acceptance, strict=True)) == plain.new
            plain.new.clear()

    def commit(self, chosen: list[int]) -> None:
        for own in chosen:
            tree, plain = self.trees[own]
            tokens, node = list[int](), plain.root
            for _ in range(self.random.choice([1, 1, 3, 8])):
                # Mostly along the tree, if not always by the best child.
                follows = node.children and self.random.random() < 0.8
                tokens.append(self.random.choice(list(node.children)) if follows else self.random.randrange(6))
                node = node.children.get(tokens[-1], PlainNode(0))
            tree.commit(tokens, self.calibration)
            plain.commit(tokens, self.plain_calibration)
            if self.random.random() < 0.1:
                tree.clear()
                plain.clear()
            assert (tree.size, tree.position) == (plain.size, plain.position)

    def check_calibration(self) -> None:
        assert self.calibration.learned.tolist() == self.plain_calibration.learned
        found = {own.rule: own for own in self.calibration.reliability()}
        for rule, bins in self.plain_calibration.bins.items():
            children, predicted, hits = map(list, zip(*bins, strict=True))
            assert (rule in found) == any(children)
            if rule in found:
                own = found[rule]
                assert (own.children, own.predicted, own.hits) == (children, predicted, hits)

    def go_on(self, rounds: int) -> int:
        """Random rounds; how many nodes were sent."""
        draw, sent = self.random, 0
        for _ in range(rounds):
            if len(self.trees) < 20 and draw.random() < 0.6:
                self.plant()
            if self.trees and draw.random() < 0.3:
                self.trees.pop(draw.randrange(len(self.trees)))[0].close()
            chosen = draw.sample(range(len(self.trees)), draw.randint(0, len(self.trees)))
            if not chosen:
                continue
            min_value = draw.choice([0.0, 0.01, 0.2])
            self.look(chosen, least=None, min_value=min_value)
            for _ in range(draw.choice([0, 2])):
                self.look(chosen, least=draw.choice([0.0, 0.1]), min_value=min_value)
            sent += sum(len(self.trees[own][1].new) for own in chosen)
            self.check_sent(chosen, draw.choice([1, 2, 3]))
            self.commit(draw.sample(chosen, draw.randint(0, len(chosen))))
            self.check_calibration()
        return sent


@pytest.mark.parametrize("seed", range(8))
def test_the_columns_hold_what_plain_objects_would(seed: int):
    assert Twins(seed).go_on(200) > 1000


def test_plain_python_grows_the_same():
    """The same functions without numba, in a process that does not find it."""
    code = (
        "import sys; sys.modules['numba'] = None\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from outrider.compiled import IS_COMPILED\n"
        "from test_guess_tree import Twins\n"
        "assert not IS_COMPILED\n"
        "for seed in range(3):\n"
        "    assert Twins(seed).go_on(100) > 500\n"
        "print('the same')\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (found.stdout, found.returncode) == ("the same\n", 0), found.stderr
