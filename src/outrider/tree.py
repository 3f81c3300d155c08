"""The token tree: what drafts grow, coordinators mirror and targets verify (torch-free).

The root stands for the last committed token. A node carries the estimate that the target accepts it given that it
accepted the parent (`acceptance`); the product along the path is its `path_value`, the chance that a verification
reaches it. Nodes with the same parent and token are one node.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from outrider.draft_distribution import DraftDistribution


class Node:
    """One token of a tree; the root has no parent and `depth` 0.

    `distribution` is the q that the token was drawn from, where a session's rule needs it (rejection).
    """

    __slots__ = ("acceptance", "children", "depth", "distribution", "parent", "path_value", "token")

    def __init__(self, token: int, parent: Node | None, acceptance: float = 1.0) -> None:
        self.token = token
        self.parent = parent
        self.acceptance = acceptance
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.path_value: float = 1.0 if parent is None else parent.path_value * acceptance
        self.children: dict[int, Node] = {}
        self.distribution: DraftDistribution | None = None

    def walk(self) -> Iterator[Node]:
        """The nodes below this one, parents before children; the node itself is left out."""
        stack = list(self.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


class TokenTree:
    """A tree that grows at its leaves and moves its root down as tokens are committed."""

    def __init__(self, root_token: int) -> None:
        self.root = Node(root_token, None)
        self.size = 0
        """Live nodes, the root not counted."""

    def add(self, parent: Node, token: int, acceptance: float) -> Node:
        """The child of `parent` with this token, made if it is not there; a known child keeps the higher estimate."""
        known = parent.children.get(token)
        if known is None:
            known = parent.children[token] = Node(token, parent, acceptance)
            self.size += 1
        elif acceptance > known.acceptance:
            known.acceptance = acceptance
            _rescale(known)
        return known

    def commit(self, token_ids: Sequence[int]) -> list[Node]:
        """Moves the root along the committed tokens; what hangs elsewhere is dropped.

        Returns:
            The nodes on the way that the tree had, in order; shorter than `token_ids` where it lacked one. In that
            case the tree is empty and its root is a new node with the last token.
        """
        path: list[Node] = []
        node: Node | None = self.root
        for token in token_ids:
            node = node.children.get(token) if node is not None else None
            if node is None:
                break
            path.append(node)
        if not token_ids:
            return path
        if node is None:
            self.root, self.size = Node(token_ids[-1], None), 0
        else:
            self._root_at(node)
        return path

    def _root_at(self, node: Node) -> None:
        node.parent, node.acceptance, node.path_value, node.depth = None, 1.0, 1.0, 0
        self.root, self.size = node, 0
        for below in node.walk():
            self.size += 1
            assert below.parent is not None
            below.depth = below.parent.depth + 1
            below.path_value = below.parent.path_value * below.acceptance

    def best(self, count: int, *, max_depth: int | None = None, min_value: float = 0.0) -> list[Node]:
        """At most `count` nodes of highest path value, best first; every node's parent stands before it."""
        frontier = [(-child.path_value, index, child) for index, child in enumerate(self.root.children.values())]
        heapify(frontier)
        made, chosen = len(frontier), []
        while frontier and len(chosen) < count:
            negative_value, _, node = heappop(frontier)
            if -negative_value < min_value:
                break
            chosen.append(node)
            if max_depth is not None and node.depth >= max_depth:
                continue
            for child in node.children.values():
                heappush(frontier, (-child.path_value, made, child))
                made += 1
        return chosen


def _rescale(node: Node) -> None:
    assert node.parent is not None
    node.path_value = node.parent.path_value * node.acceptance
    for below in node.walk():
        assert below.parent is not None
        below.path_value = below.parent.path_value * below.acceptance


def parent_numbers(nodes: Sequence[Node]) -> list[int]:
    """For nodes in an order with parents first: each one's parent as 0 (the root) or 1 + its place in `nodes`."""
    number = {id(node): place for place, node in enumerate(nodes, start=1)}
    return [number.get(id(node.parent), 0) for node in nodes]


def node_depths(parents: Sequence[int]) -> npt.NDArray[np.int32]:
    """Depths [n + 1] of the root and n nodes, from `parents` numbered as in `parent_numbers`."""
    depths = np.zeros(len(parents) + 1, dtype=np.int32)
    for number, parent in enumerate(parents, start=1):
        depths[number] = depths[parent] + 1
    return depths


def ancestor_masks(parents: Sequence[int], *, words: int | None = None) -> npt.NDArray[np.int64]:
    """Who each node may attend to: itself and its ancestors, the root included.

    Args:
        parents: [n] numbered as in `parent_numbers`.
        words: int64 words a row; default is as many as n + 1 bits need.

    Returns:
        int64 [n + 1, words]; bit j (little-endian over the words) of row i: node i attends to node j; 0 is the root.
    """
    count = len(parents) + 1
    words = (count + 63) // 64 if words is None else words
    masks = [1]
    for number, parent in enumerate(parents, start=1):
        masks.append(masks[parent] | 1 << number)
    if words == 1:
        return np.array(masks, dtype=np.uint64).view(np.int64)[:, None]
    data = b"".join(mask.to_bytes(8 * words, "little") for mask in masks)
    return np.frombuffer(data, dtype="<i8").reshape(count, words)


def climb(
    above: npt.NDArray[np.int64], number: npt.NDArray[np.int64], *, words: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Depths and ancestor masks of the rows of many trees at once: `node_depths` and `ancestor_masks` of each.

    By doubling: after k rounds a row knows its 2^k nearest ancestors.

    Args:
        above: [T] the row of each row's parent; a root's own.
        number: [T] each row's node number, 0 for roots.
        words: int64 words of a mask.

    Returns:
        Depths [T] and masks [T, words].
    """
    if words == 1:
        masks = np.left_shift(1, number)
    else:
        masks = np.zeros((len(number), words), dtype=np.int64)
        masks[np.arange(len(number)), number >> 6] = np.left_shift(1, number & 63)
    depths = (number > 0).astype(np.int64)
    while True:
        further = depths[above]
        masks |= masks[above]
        if not further.any():
            return depths, masks.reshape(len(number), words)
        depths += further
        above = above[above]


def link(
    above: npt.NDArray[np.int64], number: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """[T] each row's first child and next sibling as node numbers, -1 for none; arguments as those of `climb`."""
    links = np.full((2, len(number)), -1)
    nodes = np.flatnonzero(number)
    if len(nodes):
        parents = above[nodes]
        order = np.argsort(parents, kind="stable")
        parents, ordered = parents[order], nodes[order]
        numbers = number[ordered]
        # Of several children the last assigned stays: the first one.
        links[0, parents[::-1]] = numbers[::-1]
        links[1, ordered[:-1]] = np.where(parents[1:] == parents[:-1], numbers[1:], -1)
    return links[0], links[1]
