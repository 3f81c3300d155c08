"""Walks down verified trees: how trees reach the operators, what comes back, and where a session's walk ends.

Shapes: T rows of all trees (root and nodes, tree after tree), bs trees, n rows of the largest, S = n.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from outrider.target_worker.node_rows import NodeRows


@dataclass(frozen=True, kw_only=True, slots=True)
class Walk:
    """What the target makes of one tree.

    Attributes:
        nodes: [k] the accepted nodes' numbers, root to leaf, the root left out.
        tokens: [k + 1] theirs, and the final one.
    """

    nodes: Sequence[int]
    tokens: Sequence[int]


@dataclass(frozen=True, kw_only=True, eq=False)
class TreeLinks:
    """Trees as retrieve links (see `outrider.kernels.verify_tree`), padded to the largest; each [bs, n] int64.

    Attributes:
        candidates: tokens of the nodes, -1 for roots and padding.
        rows: of the T, -1 for padding.
        first_child, next_sibling: -1 for none.
    """

    candidates: torch.Tensor
    rows: torch.Tensor
    first_child: torch.Tensor
    next_sibling: torch.Tensor

    @classmethod
    def of(cls, trees: Sequence[NodeRows], device: torch.device) -> TreeLinks:
        """Those of trees whose rows stand one after the other."""
        rows = padded_rows(trees)
        candidates, first_child, next_sibling = (np.full_like(rows, -1) for _ in range(3))
        for place, tree in enumerate(trees):
            candidates[place, 1 : tree.count] = tree.tokens
            _link(tree.parents, first_child[place], next_sibling[place])
        columns = {
            "candidates": candidates,
            "rows": rows,
            "first_child": first_child,
            "next_sibling": next_sibling,
        }
        return cls(**{name: torch.from_numpy(column).to(device) for name, column in columns.items()})


def padded_rows(trees: Sequence[NodeRows]) -> np.ndarray:
    """[bs, n] int64: which of the T rows each node is, -1 past a tree's last."""
    rows = np.full((len(trees), max(tree.count for tree in trees)), -1, dtype=np.int64)
    first = 0
    for place, tree in enumerate(trees):
        rows[place, : tree.count] = np.arange(first, first + tree.count)
        first += tree.count
    return rows


def _link(parents: Sequence[int], first_child: np.ndarray, next_sibling: np.ndarray) -> None:
    newest: dict[int, int] = {}
    for number, parent in enumerate(parents, start=1):
        if parent in newest:
            next_sibling[newest[parent]] = number
        else:
            first_child[parent] = number
        newest[parent] = number


class WalkOutputs:
    """What a tree operator writes, and the walks that it means.

    Args:
        links: of the trees.

    Attributes:
        predicts: [bs * n] int32, the emitted token at each row of a path.
        accept_index: [bs, S] int32, the rows of each path, root first.
        accept_token_num: [bs] int32, accepted nodes.
    """

    def __init__(self, links: TreeLinks) -> None:
        trees, rows = links.rows.shape
        device = links.rows.device
        self.predicts = torch.zeros(trees * rows, dtype=torch.int32, device=device)
        self.accept_index = torch.zeros(trees, rows, dtype=torch.int32, device=device)
        self.accept_token_num = torch.zeros(trees, dtype=torch.int32, device=device)

    def walks(self) -> list[Walk]:
        """[bs] on the host."""
        tokens = self.predicts.tolist()
        found = []
        for rows, accepted in zip(self.accept_index.tolist(), self.accept_token_num.tolist(), strict=True):
            path = rows[: accepted + 1]
            # A tree's rows follow one another, so a row's distance from the root's is its number.
            found.append(Walk(nodes=[row - path[0] for row in path[1:]], tokens=[tokens[row] for row in path]))
        return found


def emit(walk: Walk, *, stop_token_ids: frozenset[int], room: int) -> tuple[list[int], list[int]]:
    """Where a walk ends for its session: at a stop token, or with the last token that may be emitted.

    Args:
        walk: of the session's tree.
        stop_token_ids: the walk ends at these.
        room: most tokens that may be emitted, at least 1.

    Returns:
        The accepted nodes, and the emitted tokens: those of the accepted nodes and the final one, which is left out
        where a stop token or `room` ended the walk at an accepted node.
    """
    emitted: list[int] = []
    for token in walk.tokens:
        emitted.append(token)
        if len(emitted) == room or token in stop_token_ids:
            break
    return list(walk.nodes[: len(emitted)]), emitted
