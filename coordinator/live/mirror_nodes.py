"""What stands in a session's mirror, node by node, under keys that stay a node's own as long as it lives."""

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from outrider.coordinator.chain_mirror import ChainMirror
from outrider.coordinator.mirror import Mirror, TreeMirror
from outrider.coordinator.trees import Tree
from outrider.draft_distribution import DraftDistribution


class MirrorNode(NamedTuple):
    """A guess.

    Attributes:
        parent: its key; that of no node where it hangs from the root.
        acceptance: estimate given that the parent is accepted.
    """

    key: int
    parent: int
    token: int
    acceptance: float


class MirrorNodes(Protocol):
    """Reads one mirror."""

    def read(self) -> Iterable[MirrorNode]:
        """All nodes, parents before children."""
        ...

    def keys_of(self, tree: Tree) -> Sequence[int]:
        """[n] of a tree that is submitted."""
        ...


def mirror_nodes(mirror: Mirror) -> MirrorNodes:
    """The reader of a mirror."""
    return _ChainNodes(mirror) if isinstance(mirror, ChainMirror) else _TreeNodes(mirror)


class _TreeNodes:
    """Keys are the forest's serial numbers: no two nodes have ever the same."""

    def __init__(self, mirror: TreeMirror) -> None:
        self._mirror = mirror

    def read(self) -> Iterable[MirrorNode]:
        forest = self._mirror.forest
        slots = np.flatnonzero((forest.row == self._mirror.row) & (forest.depth > 0))
        slots = slots[np.argsort(forest.depth[slots], kind="stable")]
        columns = (
            forest.serial[slots],
            forest.serial[forest.parent[slots]],
            forest.token[slots],
            forest.acceptance[slots],
        )
        return itertools.starmap(MirrorNode, zip(*(column.tolist() for column in columns), strict=True))

    def keys_of(self, tree: Tree) -> Sequence[int]:
        return self._mirror.forest.serial[list(tree.slots)].tolist()


class _ChainNodes:
    """A chain's nodes are told apart by the q that each was drawn from, an object of its own."""

    _ROOT = 0

    def __init__(self, mirror: ChainMirror) -> None:
        self._mirror = mirror
        self._keys: dict[int, tuple[int, DraftDistribution]] = {}
        self._next = itertools.count(self._ROOT + 1)

    def read(self) -> Iterable[MirrorNode]:
        mirror, parent, nodes = self._mirror, self._ROOT, []
        for token, acceptance, distribution in zip(mirror.tokens, mirror.acceptance, mirror.distributions, strict=True):
            key = self._key_of(distribution)
            nodes.append(MirrorNode(key, parent, token, acceptance))
            parent = key
        live = {id(distribution) for distribution in mirror.distributions}
        self._keys = {place: entry for place, entry in self._keys.items() if place in live}
        return nodes

    def keys_of(self, tree: Tree) -> Sequence[int]:
        return [self._key_of(distribution) for distribution in tree.distributions]

    def _key_of(self, distribution: DraftDistribution) -> int:
        if id(distribution) not in self._keys:
            self._keys[id(distribution)] = next(self._next), distribution
        return self._keys[id(distribution)][0]
