"""Trees of guesses, one a session: what was sent of them and is still alive.

After every commit the text is matched anew. Most of what is found then hangs below what was guessed before: it is
followed, not made again, and only what is new is sent.

Estimates of siblings come from suffixes of different lengths and may add up to more than 1: whoever is guessed first,
from the longest suffix, keeps its estimate, and the others share what it leaves.

The trees stand in shared columns, so that one call does something for all of them; `guess_kernels` has the loops.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from outrider.compiled import IS_COMPILED, entries
from outrider.draft_worker import guess_kernels as kernels
from outrider.draft_worker.guess_kernels import (
    FINALS,
    LAST_POSITION,
    MAX_DEPTH,
    MAX_NODES,
    NEW,
    NEXT_ID,
    NODE_FIELDS,
    NODE_ID,
    POSITION,
    RULE,
    SIZE,
    TREE_FIELDS,
    VALUE_FIELDS,
)
from outrider.draft_worker.ngram_calibration import NgramCalibration
from outrider.draft_worker.ngram_tree import GuessColumns, TextTails

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_FIRST_TREES, _FIRST_NODES = 16, 64


@dataclass(frozen=True, kw_only=True)
class GuessBounds:
    """Of a tree, as its session has them.

    Attributes:
        max_depth: deepest node below the root.
        max_nodes: most live nodes.
        last_position: index of the last token the session may have.
        final_tokens: that have no children.
    """

    max_depth: int
    max_nodes: int
    last_position: int
    final_tokens: frozenset[int] = frozenset()


@dataclass(slots=True)
class GuessEnds:
    """Nodes that trees are to go on below, one of each of B trees.

    Attributes:
        trees: int64 [B] their numbers.
        places: int64 [B, 2] rows of these nodes, and how deep they are below the root.
        values: float64 [B] chance that all nodes on the way are accepted.
        texts: what stands before their children.
    """

    trees: Ints
    places: Ints
    values: Floats
    texts: TextTails

    @classmethod
    def roots(cls, trees: Sequence[int], texts: TextTails) -> "GuessEnds":
        """The roots of these trees, after these texts."""
        count = len(trees)
        return cls(np.array(trees, np.int64), np.zeros((count, 2), np.int64), np.ones(count), texts)

    def __len__(self) -> int:
        return len(self.trees)

    def __getitem__(self, chosen: Any) -> "GuessEnds":
        return GuessEnds(self.trees[chosen], self.places[chosen], self.values[chosen], self.texts[chosen])


@dataclass(slots=True)
class NewGuesses:
    """Nodes of a tree that are to be sent, [n], parents before their children.

    Attributes:
        node_ids: [n].
        parents: [n] node ids, or 0 for the root.
        tokens: [n].
        acceptance: [n].
    """

    node_ids: list[int]
    parents: list[int]
    tokens: list[int]
    acceptance: list[float]


class GuessTree:
    """A session's tree in its forest, until it is closed.

    Args:
        forest: where it is.
        number: of its rows there.
        new_id: gives a node id; None: the tree counts from 1.

    Attributes:
        number: as given.
        new_id: as given.
    """

    __slots__ = ("_forest", "new_id", "number")

    def __init__(self, forest: "GuessForest", number: int, new_id: Callable[[], int] | None) -> None:
        self._forest, self.number, self.new_id = forest, number, new_id

    @property
    def size(self) -> int:
        """Live nodes, the root not counted."""
        return self._forest.trees[self.number, SIZE]

    @property
    def position(self) -> int:
        """Index of the root's token in prompt + output."""
        return self._forest.trees[self.number, POSITION]

    def commit(self, token_ids: Sequence[int], calibration: NgramCalibration) -> None:
        """Moves the root along tokens that the target has committed; what hangs elsewhere is dead.

        Args:
            token_ids: at least one.
            calibration: is told which guesses came true.
        """
        self._forest.commit(self.number, token_ids, calibration)

    def clear(self) -> None:
        """Forgets every node below the root; ids go on counting."""
        self._forest.clear(self.number)

    def close(self) -> None:
        """Gives its place in the forest back."""
        self._forest.uproot(self.number)


class GuessForest:
    """The trees of all sessions that grow by n-grams.

    Attributes:
        trees: int64 [S, TREE_FIELDS] of `guess_kernels`; another object wherever room was made.
    """

    def __init__(self) -> None:
        self._nodes = np.zeros((_FIRST_TREES, _FIRST_NODES + 1, NODE_FIELDS), np.int64)
        self._values = np.zeros((_FIRST_TREES, _FIRST_NODES + 1, VALUE_FIELDS))
        self._trees = np.zeros((_FIRST_TREES, TREE_FIELDS), np.int64)
        self._finals = np.zeros((_FIRST_TREES, 1), np.int64)
        self._free = list(range(_FIRST_TREES))[::-1]
        self._view()

    def plant(
        self, position: int, bounds: GuessBounds, *, rule: int = 0, new_id: Callable[[], int] | None = None
    ) -> GuessTree:
        """A tree without guesses.

        Args:
            position: index of the root's token in prompt + output.
            bounds: of the tree.
            rule: what the target does with its guesses (`ngram_calibration.rule_number`).
            new_id: gives its node ids; its own from 1 by default.
        """
        self._reserve(bounds.max_nodes + 1, len(bounds.final_tokens))
        number = self._free.pop()
        tree = self._trees[number]
        tree[POSITION], tree[NEXT_ID] = position, 1 if new_id is None else 0
        tree[MAX_DEPTH], tree[MAX_NODES] = bounds.max_depth, bounds.max_nodes
        tree[RULE], tree[LAST_POSITION], tree[FINALS] = rule, bounds.last_position, len(bounds.final_tokens)
        self._finals[number, : len(bounds.final_tokens)] = list(bounds.final_tokens)
        self.clear(number)
        return GuessTree(self, number, new_id)

    def uproot(self, number: int) -> None:
        """Gives a tree's place back."""
        self._free.append(number)

    def rules(self, ends: GuessEnds) -> Ints:
        """[B] the rule of each tree."""
        return self._trees[:, RULE][ends.trees]

    def graft(
        self, ends: GuessEnds, guesses: GuessColumns, estimates: Floats, buckets: Ints, *, min_value: float
    ) -> None:
        """Adds what is not there yet to each of B trees.

        Args:
            ends: what the guesses hang below.
            guesses: [B, G] of the trie.
            estimates: [B, G] that each is accepted, given its parent.
            buckets: [B, G] of the calibration.
            min_value: guesses less likely to be reached and accepted are left out, with what hangs below them.
        """
        most = guesses.tokens.shape[1]
        given = (
            ends.trees, ends.places, ends.values, guesses.tokens, guesses.parents, estimates, buckets, guesses.found,
            np.empty((most, 2), np.int64), np.empty(most),
        )  # fmt: skip
        nodes, values, trees, finals = self._columns
        kernels.graft(nodes, values, trees, finals, min_value, *map(entries, given))

    def likeliest_ends(self, roots: GuessEnds, least: float) -> GuessEnds:
        """Leaves that the best child of each node leads to, where they may have children; of as many trees as have one.

        Args:
            roots: of the trees, and the texts up to there.
            least: chance that all nodes on the way are accepted; trees of a smaller one are left out.
        """
        tails, lengths = roots.texts.tails, roots.texts.lengths
        size = len(lengths)
        longer = TextTails(np.empty(tails.shape, np.int32), np.empty(size, np.int32))
        found = GuessEnds(np.empty(size, np.int64), np.empty((size, 2), np.int64), np.empty(size), longer)
        given = (
            roots.trees, tails, lengths, np.empty(self._nodes.shape[1], np.int64),
            found.trees, found.places, found.values, longer.tails, longer.lengths,
        )  # fmt: skip
        nodes, values, trees, finals = self._columns
        count = kernels.likeliest_ends(nodes, values, trees, finals, least, *map(entries, given))
        return found if count == size else found[:count]

    def reach(self, roots: GuessEnds, parts: int) -> tuple[list[int], list[float]]:
        """How deep the first of so many parts of each tree goes, and how many nodes are accepted on the way there.

        Args:
            roots: of B trees.
            parts: into which the deepest that a node may be is divided, rounded up.

        Returns:
            [B] the depths, and [B] the mean of accepted nodes along the best child of each.
        """
        depths, reaches = np.empty(len(roots), np.int64), np.empty(len(roots))
        nodes, values, trees, _ = self._columns
        kernels.reach(nodes, values, trees, entries(roots.trees), parts, entries(depths), entries(reaches))
        return depths.tolist(), reaches.tolist()

    def send(self, trees: Sequence[GuessTree]) -> list[NewGuesses]:
        """The nodes of each tree that were not sent yet; they get their ids now."""
        for tree in trees:
            if tree.new_id is not None:
                first, end = self.trees[tree.number, NEW], self.trees[tree.number, SIZE] + 1
                self._nodes[tree.number, first:end, NODE_ID] = [tree.new_id() for _ in range(end - first)]
        numbers = np.array([tree.number for tree in trees], np.int64)
        most = len(trees) * self._nodes.shape[1]
        counts, sent, acceptance = np.empty(len(trees), np.int64), np.empty((3, most), np.int64), np.empty(most)
        nodes, values, rows, _ = self._columns
        written = map(entries, (counts, sent, acceptance))
        total = kernels.send(nodes, values, rows, entries(numbers), *written)
        node_ids, parents, tokens = sent[:, :total].tolist()
        estimates, begin, new = acceptance[:total].tolist(), 0, list[NewGuesses]()
        for count in counts.tolist():
            span = slice(begin, begin := begin + count)
            new.append(NewGuesses(node_ids[span], parents[span], tokens[span], estimates[span]))
        return new

    def commit(self, number: int, token_ids: Sequence[int], calibration: NgramCalibration) -> None:
        """`GuessTree.commit` of this one."""
        nodes, values, trees, _ = self._columns
        tokens, kept = np.array(token_ids, np.int64), np.empty(self._nodes.shape[1], np.int64)
        kernels.commit(nodes, values, trees, number, entries(tokens), entries(kept), *calibration.columns)

    def clear(self, number: int) -> None:
        """`GuessTree.clear` of this one."""
        nodes, values, trees, _ = self._columns
        kernels.clear(nodes, values, trees, number)

    def _reserve(self, rows: int, finals: int) -> None:
        """Makes room: for one more tree, for a tree's rows, for its final tokens."""
        count, had_rows = self._nodes.shape[:2]
        lacking = 0 if self._free else count
        more_rows = 0 if rows <= had_rows else max(rows, 2 * had_rows) - had_rows
        more_finals = max(0, finals - self._finals.shape[1])
        if lacking or more_rows or more_finals:
            self._free += range(count + lacking - 1, count - 1, -1)
            self._nodes = np.pad(self._nodes, ((0, lacking), (0, more_rows), (0, 0)))
            self._values = np.pad(self._values, ((0, lacking), (0, more_rows), (0, 0)))
            self._trees = np.pad(self._trees, ((0, lacking), (0, 0)))
            self._finals = np.pad(self._finals, ((0, lacking), (0, more_finals)))
            self._view()

    def _view(self) -> None:
        self._columns: Any = tuple(map(entries, (self._nodes, self._values, self._trees, self._finals)))
        # Plain Python reads entries of these sooner.
        self.trees: Any = self._trees.data


@functools.cache
def warm_up() -> None:
    """Compiles the loops, or loads what was compiled, before anybody waits for it."""
    if not IS_COMPILED:
        return
    forest = GuessForest()
    tree = forest.plant(0, GuessBounds(max_depth=2, max_nodes=2, last_position=2))
    roots = GuessEnds.roots([tree.number], TextTails.of([[1]], 1))
    numbers = np.zeros((1, 1), np.int32)
    guesses = GuessColumns(numbers, numbers - 1, np.ones((1, 1)), numbers, numbers, np.ones((1, 2), np.int32))
    forest.graft(roots, guesses, np.ones((1, 1)), np.zeros((1, 1), np.int64), min_value=0.0)
    forest.likeliest_ends(roots, 0.0)
    forest.reach(roots, 1)
    forest.send([tree])
    tree.commit([0], NgramCalibration())
