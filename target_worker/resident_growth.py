"""One session's part of a resident draft: what it may grow, the tree that was grown last, and what came true of it.

Shapes: G groups of k candidates (`outrider.target_worker.resident_trees`), n nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from outrider.acceptance_calibration import AcceptanceCalibration


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftLimits:
    """What a session lets a resident draft grow.

    Attributes:
        max_nodes: of a tree; None leaves it to the worker.
        max_depth: of a tree; None leaves it to the worker.
        is_fixed: trees follow from the session alone, not from what the worker has learned (sync mode).
    """

    max_nodes: int | None = None
    max_depth: int | None = None
    is_fixed: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class GrownNodes:
    """Nodes that were grown for a session, parents before children.

    Attributes:
        as_of: committed length that they continue.
        node_ids: [n].
        parents: [n] node ids, 0 for the root.
        tokens: [n].
        acceptance: [n] given the parent.
    """

    as_of: int
    node_ids: Sequence[int]
    parents: Sequence[int]
    tokens: Sequence[int]
    acceptance: Sequence[float]


@dataclass(frozen=True, kw_only=True, slots=True)
class GrownTree:
    """All candidates of one session's tree.

    Attributes:
        tokens, buckets, acceptance, values: [G, k].
        above: [G] the column of each group's parent, negative for the root.
    """

    tokens: npt.NDArray[np.int32]
    buckets: npt.NDArray[np.int32]
    acceptance: npt.NDArray[np.float32]
    values: npt.NDArray[np.float32]
    above: npt.NDArray[np.int32]

    def best(self, *, most: int, max_depth: int, min_value: float) -> list[int]:
        """The columns of the nodes of highest value, in ascending order: parents come first.

        Args:
            most: nodes.
            max_depth: of a node; below the root it is 1.
            min_value: of a node.
        """
        values = np.where(self.tokens.ravel() >= 0, self.values.ravel(), 0)
        values[self._depths() > max_depth] = 0
        order = np.argsort(-values, kind="stable")[:most]
        return np.sort(order[values[order] > min_value]).tolist()

    def nodes(self, columns: Sequence[int], *, as_of: int, first_id: int) -> GrownNodes:
        """These columns as nodes with ids from `first_id` on; without those whose parent is none of them."""
        top_k = self.tokens.shape[1]
        tokens, acceptance = self.tokens.ravel(), self.acceptance.ravel()
        ids: dict[int, int] = {}
        parents: list[int] = []
        for column in columns:
            above = int(self.above[column // top_k])
            if above >= 0 and above not in ids:
                continue
            ids[column] = first_id + len(ids)
            parents.append(0 if above < 0 else ids[above])
        kept = list(ids)
        return GrownNodes(
            as_of=as_of,
            node_ids=list(ids.values()),
            parents=parents,
            tokens=tokens[kept].tolist(),
            acceptance=acceptance[kept].tolist(),
        )

    def observe(self, calibration: AcceptanceCalibration, token_ids: Sequence[int]) -> None:
        """Tells the calibration of the groups whose parents lie on the path of these tokens, which follow the root."""
        group, top_k = 0, self.tokens.shape[1]
        groups = {int(above): place for place, above in enumerate(self.above)}
        for token in token_ids:
            hits = np.flatnonzero(self.tokens[group] == token)
            hit = int(hits[0]) if len(hits) else -1
            calibration.observe(self.buckets[group].astype(np.int64), hit)
            below = groups.get(group * top_k + hit) if hit >= 0 else None
            if below is None:
                return
            group = below

    def _depths(self) -> npt.NDArray[np.int64]:
        """[G k] of every candidate: the root's are 1, and k groups make a level below it."""
        groups, top_k = self.tokens.shape
        of_group = np.concatenate([[1], 2 + np.arange(groups - 1) // top_k])
        return np.repeat(of_group, top_k)
