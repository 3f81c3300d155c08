"""The trees of a batch, in columns: what is chosen of all sessions is cut from the forest at once, and sent as it is.

One session's tree is cut out of them only for who asks: a trace, or somebody who watches it.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple, overload

import numpy as np

from outrider.coordinator.forest import Floats
from outrider.coordinator.messages import TreeSubmission
from outrider.coordinator.rows import Ints
from outrider.draft_distribution import DraftDistribution

_CHAIN = -1


class Tree(NamedTuple):
    """What is submitted of one session.

    Attributes:
        slots: [n] where the forest has each node; empty for chains.
        tokens: [n]
        parents: [n] as numbered by `outrider.tree.parent_numbers`.
        values: [n] path values.
        distributions: [n] of a chain; empty otherwise.
    """

    slots: Sequence[int] = ()
    tokens: Sequence[int] = ()
    parents: Sequence[int] = ()
    values: Sequence[float] = ()
    distributions: Sequence[DraftDistribution] = ()


class Trees(Sequence[Tree]):
    """The trees of S sessions, n nodes in all; those of a session stand together.

    Attributes:
        counts: [S] nodes of each.
        starts: [S] where they begin.
        slots: [n] -1 for a chain's.
        tokens: [n]
        parents: [n]
        values: [n]
        distributions: [n] None for a tree's; empty where no tree is a chain.
    """

    def __init__(
        self,
        *,
        counts: Ints,
        slots: Ints,
        tokens: list[int],
        parents: list[int],
        values: Floats,
        distributions: Sequence[DraftDistribution | None] = (),
    ) -> None:
        self.counts: Ints = counts
        self.starts: Ints = np.cumsum(counts) - counts
        self.slots, self.tokens, self.parents, self.values = slots, tokens, parents, values
        self.distributions = distributions

    @classmethod
    def of(cls, trees: Iterable[Tree]) -> "Trees":
        """These trees in columns."""
        trees = list(trees)
        slots = [tree.slots or [_CHAIN] * len(tree.tokens) for tree in trees]
        distributions: list[DraftDistribution | None] = []
        if any(tree.distributions for tree in trees):
            for tree in trees:
                distributions += tree.distributions or [None] * len(tree.tokens)
        return cls(
            counts=np.array([len(tree.tokens) for tree in trees], dtype=np.int64),
            slots=np.array(list(itertools.chain.from_iterable(slots)), dtype=np.int64),
            tokens=list(itertools.chain.from_iterable(tree.tokens for tree in trees)),
            parents=list(itertools.chain.from_iterable(tree.parents for tree in trees)),
            values=np.array(list(itertools.chain.from_iterable(tree.values for tree in trees)), dtype=np.float64),
            distributions=distributions,
        )

    @classmethod
    def empty(cls, sessions: int) -> "Trees":
        """Of so many sessions none has nodes."""
        slots, values = np.zeros(0, dtype=np.int64), np.zeros(0)
        return cls(counts=np.zeros(sessions, dtype=np.int64), slots=slots, tokens=[], parents=[], values=values)

    def __len__(self) -> int:
        return len(self.counts)

    @overload
    def __getitem__(self, place: int) -> Tree: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Tree]: ...
    def __getitem__(self, place: int | slice) -> "Tree | Sequence[Tree]":
        if isinstance(place, slice):
            return [self[number] for number in range(*place.indices(len(self)))]
        nodes = self._nodes(place)
        slots = self.slots[nodes].tolist()
        drawn = [q for q in self.distributions[nodes] if q is not None]
        return Tree([] if drawn else slots, self.tokens[nodes], self.parents[nodes], self.values[nodes].tolist(), drawn)

    def _nodes(self, place: int) -> slice:
        start = int(self.starts[place])
        return slice(start, start + int(self.counts[place]))


class Submissions(Sequence[TreeSubmission]):
    """A batch as it is sent: S sessions' trees.

    Attributes:
        session_ids: [S]
        epochs: [S]
        lengths: [S] committed tokens.
        trees: [S]
        resident: [S] whether the target has the tree itself; empty where it has none.
    """

    def __init__(
        self,
        session_ids: Sequence[int],
        epochs: Sequence[int],
        lengths: Sequence[int],
        trees: Trees,
        resident: Sequence[bool] = (),
    ) -> None:
        self.session_ids, self.epochs, self.lengths, self.trees = session_ids, epochs, lengths, trees
        self.resident = resident

    def __len__(self) -> int:
        return len(self.session_ids)

    @overload
    def __getitem__(self, place: int) -> TreeSubmission: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[TreeSubmission]: ...
    def __getitem__(self, place: int | slice) -> "TreeSubmission | Sequence[TreeSubmission]":
        if isinstance(place, slice):
            return [self[number] for number in range(*place.indices(len(self)))]
        tree = self.trees[place]
        return TreeSubmission(
            self.session_ids[place],
            self.epochs[place],
            self.lengths[place],
            tree.tokens,
            tree.parents,
            tree.distributions,
            bool(self.resident) and self.resident[place],
        )
