"""The trees of all sessions of a step at once, as numpy: who sees whom, what rows choose by, which nodes follow which.

A step's host time is one of its costs: nothing here loops over nodes but the lists they come in.

Shapes: T rows of all trees (root and nodes, tree after tree), bs trees, n rows of the largest, W mask words.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from outrider.engine.batch import TreeChoices
from outrider.engine.step_trees import RECORD, leave_decided
from outrider.target_worker.node_rows import NodeRows
from outrider.tree import climb, link


class Forest:
    """Trees whose rows follow one another; at least one.

    Attributes:
        counts: [bs] rows of each tree.
        first: [bs] the first row of each.
        number: [T] each row's node number, 0 for roots.
        tokens: [T] int32.
        depths: [T].
        masks: [T, W] int64, bit j of row i: the node attends to node j of its tree.
    """

    def __init__(self, trees: Sequence[NodeRows]) -> None:
        self._trees = trees
        tokens: list[int] = []
        parents: list[int] = []
        for tree in trees:
            tokens.append(tree.session.tokens[-1])
            tokens.extend(tree.tokens)
            parents.append(0)
            parents.extend(tree.parents)
        self.counts = np.array([len(tree.tokens) + 1 for tree in trees])
        self.first = np.cumsum(self.counts) - self.counts
        self.tokens = np.array(tokens, dtype=np.int32)
        base = np.repeat(self.first, self.counts)
        self.number = np.arange(len(tokens)) - base
        # Rows of the parents; a root is its own.
        self._above = np.array(parents) + base
        words = (int(self.counts.max()) + 63) // 64
        self.depths, self.masks = climb(self._above, self.number, words=words)

    def rows_of(self, place: int) -> slice:
        """The rows of one tree."""
        return slice(int(self.first[place]), int(self.first[place] + self.counts[place]))

    def choices(self) -> TreeChoices:
        """What all rows choose by, and the trees' links."""
        record = np.frombuffer(b"".join([tree.session.sampling.record for tree in self._trees]), dtype=RECORD)
        columns = np.repeat(record, self.counts)
        roots = np.array([tree.session.root_index for tree in self._trees], dtype=np.int32)
        first_child, next_sibling = link(self._above, self.number)
        tree_rows = self._padded(np.arange(len(self.number)))
        leave_decided(decided_ends(self._trees), tree_rows)
        return TreeChoices(
            seeds=columns["seeds"],
            positions=(np.repeat(roots + 1, self.counts) + self.depths).astype(np.int32),
            temperature=columns["temperature"],
            top_p=columns["top_p"],
            min_p=columns["min_p"],
            top_k=columns["top_k"],
            choice_index=columns["choice_index"],
            candidates=self._padded(np.where(self.number > 0, self.tokens, -1)),
            tree_rows=tree_rows,
            first_child=self._padded(first_child),
            next_sibling=self._padded(next_sibling),
        )

    def _padded(self, values: np.ndarray) -> npt.NDArray[np.int32]:
        """[T] values as [bs, n], -1 past a tree's last row."""
        most = int(self.counts.max())
        padded = np.full((len(self.counts), most), -1, dtype=np.int32)
        padded.reshape(-1)[np.repeat(np.arange(len(self.counts)) * most, self.counts) + self.number] = values
        return padded


def decided_ends(trees: Sequence[NodeRows]) -> list[tuple[int, int]]:
    """The trees whose path is decided (`outrider.target_worker.synthetic`), each with the number of its last node."""
    return [(place, tree.decided.end) for place, tree in enumerate(trees) if tree.decided is not None]
