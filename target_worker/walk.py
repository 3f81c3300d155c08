"""Walks down verified trees: how trees reach the operators, what comes back, and where a session's walk ends.

Shapes: T rows of all trees (root and nodes, tree after tree), bs trees, n rows of the largest, S = n.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch

from outrider.target_worker.forest import Forest
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
class ChoiceColumns:
    """`TreeChoices` on a device, as the operators take them: floats float32, everything else int64."""

    seeds: torch.Tensor
    positions: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    choice_index: torch.Tensor
    candidates: torch.Tensor
    tree_rows: torch.Tensor
    first_child: torch.Tensor
    next_sibling: torch.Tensor

    @classmethod
    def of(cls, trees: Sequence[NodeRows], device: torch.device) -> ChoiceColumns:
        """Those of all rows of the trees, tree after tree."""
        choices = Forest(trees).choices()
        columns = {}
        for field in fields(cls):
            values = getattr(choices, field.name)
            kept = values if values.dtype == np.float32 else values.astype(np.int64)
            columns[field.name] = torch.from_numpy(np.ascontiguousarray(kept)).to(device)
        return cls(**columns)


class WalkOutputs:
    """What a tree operator writes, and the walks that it means.

    Args:
        tree_rows: [bs, n] of the trees.

    Attributes:
        predicts: [bs * n] int32, the emitted token at each row of a path.
        accept_index: [bs, S] int32, the rows of each path, root first.
        accept_token_num: [bs] int32, accepted nodes.
    """

    def __init__(self, tree_rows: torch.Tensor) -> None:
        trees, rows = tree_rows.shape
        device = tree_rows.device
        self.predicts = torch.zeros(trees * rows, dtype=torch.int32, device=device)
        self.accept_index = torch.zeros(trees, rows, dtype=torch.int32, device=device)
        self.accept_token_num = torch.zeros(trees, dtype=torch.int32, device=device)

    def walks(self) -> list[Walk]:
        """[bs] on the host."""
        rows, accepted = self.accept_index.cpu().numpy(), self.accept_token_num.cpu().numpy()
        return walks_of(self.predicts.cpu().numpy()[rows], rows, accepted)


def walks_of(tokens: np.ndarray, rows: np.ndarray, accepted: np.ndarray) -> list[Walk]:
    """The walks that paths mean.

    Args:
        tokens: [bs, m] the token chosen at each row of a path.
        rows: [bs, m] the rows, root first.
        accepted: [bs] accepted nodes; what lies past them means nothing.
    """
    # A tree's rows follow one another, so a row's distance from the root's is its number.
    numbers = (rows[:, 1:] - rows[:, :1]).tolist()
    return [
        Walk(nodes=nodes[:count], tokens=chosen[: count + 1])
        for nodes, chosen, count in zip(numbers, tokens.tolist(), accepted.tolist(), strict=True)
    ]


def completed(walks: Sequence[Walk], trees: Sequence[NodeRows]) -> list[Walk]:
    """The walks, but of trees whose path was decided: that path, and the token chosen at its end."""
    return [
        walk
        if (path := tree.decided) is None
        else Walk(nodes=path.nodes, tokens=[*path.tokens, path.final(walk.tokens[0])])
        for walk, tree in zip(walks, trees, strict=True)
    ]


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
