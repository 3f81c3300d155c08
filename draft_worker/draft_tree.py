"""The draft's side of a token tree: which nodes have KV, which are next to be expanded, and what a commit leaves.

A node is *expanded* once a forward over it has given its children; from then on its KV lies in the session's row of
the slot table at key index `tree_start + key_offset`, where `tree_start` is the committed length. The root's own KV
belongs to the committed prefix.
"""

from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import cast

import numpy as np
import numpy.typing as npt

from outrider.draft_distribution import DraftDistribution
from outrider.tree import Node, TokenTree


class DraftNode(Node):
    """A node as the draft holds it.

    Attributes:
        node_id: unique in its session's epoch, from 1; 0 for a root that was never a node.
        position: index of the token in prompt + output.
        key_offset: where its KV lies in the tree region; -1 without KV, and for the root.
        mask: bit j: attends to key offset j; itself and its ancestors below the root.
        child_tokens: tokens of all children that were considered, best first; None until it is expanded.
        child_buckets: [k] calibration buckets of `child_tokens`; None also where nothing is learned from them.
    """

    __slots__ = ("child_buckets", "child_tokens", "key_offset", "mask", "node_id", "position")

    children: dict[int, "DraftNode"]  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, token: int, parent: "DraftNode | None", acceptance: float, node_id: int, position: int) -> None:
        super().__init__(token, parent, acceptance)
        self.node_id = node_id
        self.position = position
        self.key_offset = -1
        self.mask = 0
        self.child_tokens: list[int] | None = None
        self.child_buckets: npt.NDArray[np.int64] | None = None


class DraftTree(TokenTree):
    """A token tree with a frontier: the nodes that can be expanded, best path value first.

    Args:
        root_token: the last committed token.
        position: its index in prompt + output.
        max_depth: deepest node below the root.
        max_children: most children of a node.
        last_position: index of the last token the session may have; nodes there have no children.
        final_tokens: tokens that end the session; nodes that hold one have no children.
    """

    root: DraftNode  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(
        self,
        root_token: int,
        position: int,
        *,
        max_depth: int,
        max_children: int,
        last_position: int,
        final_tokens: frozenset[int],
    ) -> None:
        super().__init__(root_token)
        self.last_position = last_position
        self._max_depth = max_depth
        self._max_children = max_children
        self._final_tokens = final_tokens
        self._next_id = 1
        # Ids break ties, so that equal values are expanded in the order they were made.
        self._frontier: list[tuple[float, int, DraftNode]] = []
        self.root = DraftNode(root_token, None, 1.0, 0, position)

    @property
    def best_value(self) -> float:
        """Path value of the best node that can be expanded; 0 if there is none."""
        return -self._frontier[0][0] if self._frontier else 0.0

    def may_expand(self, node: DraftNode) -> bool:
        """Whether the node may have children now, be they known or not."""
        return (
            node.token not in self._final_tokens and node.position < self.last_position and node.depth < self._max_depth
        )

    def grow(
        self,
        parent: DraftNode,
        tokens: list[int],
        acceptance: Sequence[float],
        buckets: npt.NDArray[np.int64] | None,
        *,
        distribution: DraftDistribution | None = None,
        min_acceptance: float = 0.0,
    ) -> list[DraftNode]:
        """Gives an unexpanded node its children.

        Args:
            parent: the node.
            tokens: [k] best first; -1 past the last that may be chosen.
            acceptance: [k] estimates given the parent.
            buckets: [k] calibration buckets; None where nothing is to be learned from the children.
            distribution: the q that the only child was drawn from, under rejection.
            min_acceptance: children below it are remembered for the calibration alone.

        Returns:
            The new nodes.
        """
        assert parent.child_tokens is None, "a node is expanded twice"
        if tokens and tokens[-1] < 0:
            tokens = [token for token in tokens if token >= 0]
            buckets = None if buckets is None else buckets[: len(tokens)]
        parent.child_tokens, parent.child_buckets = tokens, buckets
        position, deep = parent.position + 1, parent.depth + 1 >= self._max_depth
        made = []
        # Fewer children than estimates where the vocabulary or the credit is smaller than the branching.
        for token, estimate in zip(tokens[: self._max_children], acceptance, strict=False):
            if estimate < min_acceptance:
                continue
            child = DraftNode(token, parent, estimate, self._next_id, position)
            child.distribution = distribution
            self._next_id += 1
            parent.children[token] = child
            made.append(child)
            if not deep and position < self.last_position and token not in self._final_tokens:
                heappush(self._frontier, (-child.path_value, child.node_id, child))
        self.size += len(made)
        return made

    def take(self, count: int, min_value: float = 0.0) -> list[DraftNode]:
        """Removes the best nodes of the frontier, at most `count` of at least `min_value`, for expansion."""
        taken = []
        while self._frontier and len(taken) < count and -self._frontier[0][0] >= min_value:
            taken.append(heappop(self._frontier)[2])
        return taken

    def clear(self) -> None:
        """Drops every node below the root; ids go on counting."""
        self.root = DraftNode(self.root.token, None, 1.0, self.root.node_id, self.root.position)
        self.size = 0
        self._frontier = []

    def reroot(self, token_ids: Sequence[int]) -> tuple[list[DraftNode], list[DraftNode]]:
        """Moves the root along the committed tokens.

        Returns:
            The nodes on the way that the tree had, in order, and the expanded nodes that survive below the new root,
            parents before children.
        """
        position = self.root.position + len(token_ids)
        path = cast("list[DraftNode]", self.commit(token_ids))
        self._frontier = []
        if len(path) < len(token_ids):
            self.root = DraftNode(token_ids[-1], None, 1.0, 0, position)
            return path, []
        expanded = []
        for node in self.nodes():
            if node.child_tokens is not None:
                expanded.append(node)
            elif self.may_expand(node):
                self._frontier.append((-node.path_value, node.node_id, node))
        heapify(self._frontier)
        return path, expanded

    def nodes(self) -> Iterator[DraftNode]:
        """All nodes below the root, parents before children."""
        return cast("Iterator[DraftNode]", self.root.walk())


def assign_keys(nodes: Sequence[DraftNode], first_offset: int) -> None:
    """Gives nodes consecutive key offsets and the masks that follow from their parents', parents before children."""
    for offset, node in enumerate(nodes, start=first_offset):
        assert node.parent is not None
        node.key_offset = offset
        node.mask = cast("DraftNode", node.parent).mask | 1 << offset


def mask_words(nodes: Sequence[DraftNode]) -> npt.NDArray[np.int64]:
    """The nodes' masks as int64 words [n, w], bit j little-endian over the words."""
    bits = max(node.mask for node in nodes).bit_length()
    if bits <= 64:
        return np.array([node.mask for node in nodes], dtype=np.uint64).view(np.int64)[:, None]
    words = (bits + 63) // 64
    data = b"".join(node.mask.to_bytes(words * 8, "little") for node in nodes)
    return np.frombuffer(data, dtype="<i8").reshape(len(nodes), words)
