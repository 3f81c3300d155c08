"""The tree of a session in sync mode: the best nodes below the root, whatever else the worker does.

In sync mode a round has one tree: the N nodes of highest value. Nodes are expanded best first, so once no unexpanded
node is worth more than the N-th best, nothing that is still unknown can be among the N. Which steps expanded what, and
in what company, then makes no difference.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from outrider.draft_worker.rounds.session import SessionStart
from outrider.drafting.draft_distribution import DraftDistribution


@dataclass(slots=True)
class _Node:
    node_id: int
    parent: int
    token: int
    acceptance: np.float32
    value: np.float32
    path: tuple[int, ...]
    distribution: DraftDistribution | None
    is_open: bool


class SyncTree:
    """One round's tree.

    Args:
        start: what opened the session; it has N, the depth and the stop tokens.
        as_of: committed length of the round.
        end: length at which the session ends.
        min_value: nodes below are not expanded.
        capacity: nodes that fit.
    """

    def __init__(self, start: SessionStart, as_of: int, end: int, *, min_value: float, capacity: int) -> None:
        self.as_of = as_of
        self._most, self._stops = start.limits.sync_nodes, start.stop_ids
        self._max_depth = min(start.limits.max_depth, end - as_of)
        self._min_value, self._capacity = np.float32(min_value), capacity
        self._nodes: dict[int, _Node] = {}

    def expand(
        self,
        parent: int,
        node_ids: Sequence[int],
        tokens: Sequence[int],
        acceptance: Sequence[float],
        distribution: DraftDistribution | None = None,
    ) -> None:
        """Add the children of a node, 0 for the root."""
        above = self._nodes.get(parent)
        if above is not None:
            if not above.is_open:
                # The device knows fewer stop tokens, and may have expanded it.
                return
            above.is_open = False
        path = above.path if above is not None else ()
        for node_id, token, estimate in zip(node_ids, tokens, acceptance, strict=True):
            value = np.float32(estimate) * (np.float32(1) if above is None else above.value)
            is_open = len(path) + 1 < self._max_depth and token not in self._stops and bool(value >= self._min_value)
            self._nodes[node_id] = _Node(
                node_id, parent, token, np.float32(estimate), value, (*path, token), distribution, is_open
            )

    @property
    def is_complete(self) -> bool:
        """True if no step after the root's can change the best nodes any more, or there is no room for more."""
        values = sorted((node.value for node in self._nodes.values()), reverse=True)
        least = values[self._most - 1] if len(values) >= self._most else np.float32(0)
        best = max((node.value for node in self._nodes.values() if node.is_open), default=np.float32(0))
        return bool(best <= least) or len(values) >= self._capacity

    def best(self) -> list[_Node]:
        """Return the N best nodes, parents before children."""
        # A child is worth no more than its parent, and of equals the shorter path comes first.
        ranked = sorted(self._nodes.values(), key=lambda node: (-node.value, len(node.path), node.path))
        return ranked[: self._most]
