"""The trees of a step as columns: one object for all, and one a session only where somebody looks at one.

Shapes: S sessions, A of them with a tree to verify, T rows of these (root and nodes, tree after tree).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np
import numpy.typing as npt

from outrider.target_worker.sessions import SessionKey, TreeRequest, TreeResult
from outrider.wire import split_by_counts

Ints = npt.NDArray[np.int64]


class AskedTrees(Sequence[TreeRequest]):
    """What is asked of S sessions; as a sequence, the requests.

    A device may wait while it is made and looked at, so requests are made when they are asked for.

    Attributes:
        keys: [S]
        epochs: [S]
        lengths: [S] committed tokens that the sender holds.
        settled: [S] results where there is nothing to verify any more; such sessions have no tree.
        counts: [A] rows of each tree.
        tokens: [T]; of roots they mean nothing.
        parents: [T] node numbers within the tree; 0 of roots.
    """

    __slots__ = ("_requests", "counts", "epochs", "keys", "lengths", "parents", "settled", "tokens")

    def __init__(
        self,
        keys: Sequence[SessionKey],
        epochs: Sequence[int],
        lengths: Sequence[int],
        settled: Sequence[TreeResult | None],
        rows: tuple[Sequence[int], Ints, Ints],
    ) -> None:
        self.keys, self.epochs, self.lengths, self.settled = keys, epochs, lengths, settled
        self.counts, self.tokens, self.parents = rows
        self._requests: Sequence[TreeRequest] | None = None

    @classmethod
    def of(cls, requests: Sequence[TreeRequest]) -> AskedTrees | None:
        """Those of requests; None where one asks for more than for its nodes to be verified, or is torn."""
        counts: list[int] = []
        tokens: list[int] = []
        parents: list[int] = []
        for tree in requests:
            if tree.settled is not None:
                continue
            if tree.resident or tree.distributions or len(tree.tokens) != len(tree.parents):
                return None
            counts.append(1 + len(tree.tokens))
            tokens.append(0)
            tokens.extend(tree.tokens)
            parents.append(0)
            parents.extend(tree.parents)
        asked = cls(
            [tree.key for tree in requests],
            [tree.epoch for tree in requests],
            [tree.length for tree in requests],
            [tree.settled for tree in requests],
            (counts, np.array(tokens, dtype=np.int64), np.array(parents, dtype=np.int64)),
        )
        asked._requests = requests
        return asked

    def node_counts(self) -> list[int]:
        """[S] nodes of each session."""
        counts = iter(self.counts)
        return [0 if settled is not None else next(counts) - 1 for settled in self.settled]

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[TreeRequest]:
        return iter(self._made())

    @overload
    def __getitem__(self, index: int) -> TreeRequest: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[TreeRequest]: ...
    def __getitem__(self, index: int | slice) -> TreeRequest | Sequence[TreeRequest]:
        return self._made()[index]

    def _made(self) -> Sequence[TreeRequest]:
        if self._requests is None:
            tokens, parents, rows = self.tokens.tolist(), self.parents.tolist(), split_by_counts(self.counts)
            nodes = [
                slice(0, 0) if settled is not None else slice((own := next(rows)).start + 1, own.stop)
                for settled in self.settled
            ]
            self._requests = [
                TreeRequest(
                    key=key, epoch=epoch, length=length, tokens=tokens[own], parents=parents[own], settled=settled
                )
                for key, epoch, length, settled, own in zip(
                    self.keys, self.epochs, self.lengths, self.settled, nodes, strict=True
                )
            ]
        return self._requests


def node_counts(trees: Sequence[TreeRequest]) -> list[int]:
    """[S] nodes of each."""
    return trees.node_counts() if isinstance(trees, AskedTrees) else [len(tree.tokens) for tree in trees]


def row_count(trees: Sequence[TreeRequest]) -> int:
    """T, with a row for each session that has no tree."""
    if isinstance(trees, AskedTrees):
        return len(trees.tokens) + len(trees) - len(trees.counts)
    return sum(1 + len(tree.tokens) for tree in trees)
