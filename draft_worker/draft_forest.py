"""The trees of all sessions of a worker in shared columns, and what is done to all of them at once.

`tree_kernels` has the loops; here the columns get room where it runs out, and arrays go in and out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from outrider.compiled import entries
from outrider.draft_worker import tree_kernels as kernels
from outrider.draft_worker.tree_kernels import FIELDS, HEAP, KEYS, POOL_FIELDS, ROOT, SIZE, TREE_FIELDS, TreeColumns
from outrider.engine.tree_rows import TreeRows

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

FIRST_GUESS = 0.7
"""What a best child is worth that nobody has seen, at first."""
_FIRST_NODES, _FIRST_HEAP = 1024, 256
_MANY = 1 << 32
NO_NODES: Ints = np.empty((0, 2), dtype=np.int64)


@dataclass(frozen=True, slots=True)
class GrownNodes:
    """The children that a step gave, of P sessions one after the other.

    Attributes:
        made: [R] children of each node.
        expanded: [P] nodes of each that were still there.
        counts: [P] children of each.
        node_ids: [n].
        parents: [n] node ids, or 0 for the root.
        tokens: [n].
        acceptance: [n] float64.
    """

    made: list[int]
    expanded: list[int]
    counts: list[int]
    node_ids: Ints
    parents: Ints
    tokens: Ints
    acceptance: Floats


@dataclass(frozen=True, slots=True)
class TakenNodes:
    """The nodes that a step takes, of P sessions one after the other.

    Attributes:
        trees: [P] whose.
        counts: [P] nodes of each.
        nodes: [T, 2] rows and serial numbers.
        rows: as a step takes them; a session's row of the slot table has its tree's number.
    """

    trees: list[int]
    counts: list[int]
    nodes: Ints
    rows: TreeRows


@dataclass(frozen=True, kw_only=True)
class TakingLimits:
    """How a step's nodes are chosen; see `GrowthConfig`."""

    branching: int
    max_session_nodes: int
    min_session_nodes: int
    max_live_nodes: int
    max_row_len: int
    most_promised: int
    min_path_value: float


class DraftForest:
    """Room for the trees of so many sessions, which `DraftTree` plants.

    Args:
        trees: S.
        children: of a node, K.
        nodes: of a tree that have KV; more find room as well.

    Attributes:
        columns: as the loops read and write them; another object wherever room was made.
        records: [S, 8] int32, how the children of each tree's nodes are ranked (`SamplingSpec.record`).
    """

    def __init__(self, trees: int, *, children: int = 4, nodes: int = 64) -> None:
        self.records = np.zeros((trees, 8), dtype=np.int32)
        size, words = _FIRST_NODES, -(-nodes // 64)
        self._arrays = TreeColumns(
            nodes=np.zeros((size, FIELDS + 3 * children), dtype=np.int64),
            values=np.zeros((size, 2)),
            masks=np.zeros((size, words), dtype=np.int64),
            trees=np.zeros((trees, TREE_FIELDS), dtype=np.int64),
            guesses=np.full(trees, FIRST_GUESS),
            heaps=np.zeros((trees, _FIRST_HEAP), dtype=np.int64),
            finals=np.zeros((trees, 1), dtype=np.int64),
            keyed=np.full((trees, 64 * words), -1, dtype=np.int64),
            pool=np.zeros(POOL_FIELDS + size, dtype=np.int64),
            scratch=np.zeros(size, dtype=np.int64),
        )
        self._arrays.nodes[:, kernels.SERIAL] = -1
        self._arrays.trees[:, ROOT] = -1
        self._arrays.pool[kernels.FREE_ROWS] = size
        # Consecutive rows for what grows together.
        self._arrays.pool[POOL_FIELDS:] = np.arange(size)[::-1]
        self._view()

    @property
    def arrays(self) -> TreeColumns:
        """`columns` for whole rows at a time."""
        return self._arrays

    @property
    def children(self) -> int:
        """K."""
        return (self._arrays.nodes.shape[1] - FIELDS) // 3

    def grow(
        self,
        rows: Ints,
        spans: Sequence[int],
        tokens: Ints,
        acceptance: Floats,
        buckets: Ints,
        *,
        learned: Ints,
        least: float,
    ) -> GrownNodes:
        """Gives the nodes of a step that are still there their children.

        Args:
            rows: [R, 2] rows and serial numbers.
            spans: [P] how many of them each session has, one after the other.
            tokens: [R, k] best first; -1 past the last that may be chosen.
            acceptance: [R, k] estimates given the parent.
            buckets: [R, k] calibration buckets.
            learned: [R] whether anything is to be learned from them.
            least: children below it are remembered for the calibration alone.
        """
        count, width = tokens.shape
        counts, grown = np.empty((2, len(spans)), np.int64), np.empty((3, count * width), np.int64)
        estimates, of_each, made = np.empty(count * width), np.array(spans, dtype=np.int64), np.empty(count, np.int64)
        given = (rows, of_each, tokens, acceptance, buckets, learned, least, made, counts, grown, estimates)
        while (total := kernels.grow_step(self.columns, *given)) < 0:
            self.reserve(rows=count * width, children=width, heap=count * width)
        expanded, of_spans = counts.tolist()
        return GrownNodes(
            made.tolist(), expanded, of_spans, grown[0, :total], grown[1, :total], grown[2, :total], estimates[:total]
        )

    def take(
        self,
        candidates: Sequence[int],
        lengths: Sequence[int],
        limits: TakingLimits,
        *,
        width: int,
        turn: int,
        before: Ints = NO_NODES,
    ) -> tuple[TakenNodes, int]:
        """Takes the best nodes over all trees.

        Args:
            candidates: [C] the trees that may have a part.
            lengths: [S] slots of each tree's row of the slot table.
            limits: how.
            width: most nodes.
            turn: which of the trees that can grow came first at the last step.
            before: [B, 2] rows and serial numbers of the nodes of the step under way.

        Returns:
            The nodes, and which tree came first.
        """
        words = self._arrays.masks.shape[1]
        sessions, nodes = np.empty((4, len(candidates)), np.int64), np.empty((width, 2), np.int64)
        rows, masks = np.empty((4, width), np.int64), np.empty((width, words), np.int64)
        records = np.empty((width, 8), np.int32)
        settings = (
            width, limits.branching, limits.max_session_nodes, limits.min_session_nodes, limits.max_live_nodes,
            limits.max_row_len, turn, limits.most_promised,
        )  # fmt: skip
        given = (
            before, np.array(candidates, np.int64), np.array(lengths, np.int64), settings, limits.min_path_value,
            self.records, sessions, nodes, rows, masks, records,
        )  # fmt: skip
        while (found := kernels.plan_trees(self.columns, *given)) < 0:
            self.reserve(rows=len(before), heap=len(before))
        sharing, growing = found % _MANY, found // _MANY
        trees, _, ends, counts = sessions[:, :sharing].tolist()
        total = sum(counts)
        added = TreeRows(
            sessions=sessions[:, :sharing].copy(),
            rows=rows if total == width else rows[:, :total].copy(),
            masks=masks[:total],
            records=records[:total],
            most_keys=max(ends, default=0),
            most_queries=max(counts, default=0),
        )
        return TakenNodes(trees, counts, nodes[:total], added), (turn + 1) % growing if growing > 1 else turn

    def reserve(self, *, rows: int = 0, children: int = 0, heap: int = 0, keys: int = 0, final: int = 0) -> None:
        """Makes room: free rows, children of a node, further entries of a heap, key offsets, final tokens."""
        arrays = self._arrays
        before = arrays
        if (lacking := rows - int(arrays.pool[kernels.FREE_ROWS])) > 0:
            arrays = _with_rows(arrays, max(lacking, len(arrays.nodes)))
        if children > self.children:
            arrays = arrays._replace(nodes=_with_children(arrays.nodes, children))
        if int(arrays.trees[:, HEAP].max()) + heap > arrays.heaps.shape[1]:
            arrays = arrays._replace(heaps=_wider(arrays.heaps, int(arrays.trees[:, HEAP].max()) + heap, 0))
        if keys > arrays.keyed.shape[1]:
            arrays = arrays._replace(keyed=_wider(arrays.keyed, keys, -1))
        if keys > 64 * arrays.masks.shape[1]:
            arrays = arrays._replace(masks=_wider(arrays.masks, -(-keys // 64), 0))
        if final > arrays.finals.shape[1]:
            arrays = arrays._replace(finals=_wider(arrays.finals, final, 0))
        if arrays is not before:
            self._arrays = arrays
            self._view()

    def commit(self, tree: int, tokens: Sequence[int]) -> tuple[Ints, list[int], int]:
        """Moves a tree's root along committed tokens, at least one.

        Returns:
            What they say of the estimates, [n, 2 + K]: for each parent on the way the child that was committed
            (negative if none was), how many children there are, and their calibration buckets. The key offsets that are
            kept: of the nodes on the way, as far as they have KV, and of those that survive, ascending; these have the
            offsets from 0 on then. How many are on the way.
        """
        self.reserve_heap(tree)
        kept = np.empty(len(tokens) + self.trees[tree, KEYS], np.int64)
        seen = np.empty((len(tokens), 2 + self.children), np.int64)
        committed = np.array(tokens, dtype=np.int64)
        parents, path, total = kernels.commit(self.columns, tree, committed, seen, kept)
        return seen[:parents], kept[:total].tolist(), path

    def reserve_heap(self, tree: int) -> None:
        """Room in the heap for all that may be expanded once the root has come nearer."""
        most = self.trees[tree, SIZE] + self.trees[tree, KEYS]
        if most > self._arrays.heaps.shape[1]:
            self._arrays = self._arrays._replace(heaps=_wider(self._arrays.heaps, most, 0))
            self._view()

    def _view(self) -> None:
        arrays = self._arrays
        self.columns: Any = TreeColumns(*map(entries, arrays))
        # Plain Python reads entries of these sooner.
        views: list[Any] = [memoryview(array) for array in arrays[:5]]
        self.nodes, self.values, self.masks, self.trees, self.guesses = views


def _with_rows(arrays: TreeColumns, more: int) -> TreeColumns:
    size, free = len(arrays.nodes), int(arrays.pool[kernels.FREE_ROWS])
    nodes = _longer(arrays.nodes, more)
    nodes[size:, kernels.SERIAL] = -1
    pool = _longer(arrays.pool, more)
    # Those that were free stay on top.
    pool[POOL_FIELDS + more : POOL_FIELDS + more + free] = arrays.pool[POOL_FIELDS : POOL_FIELDS + free]
    pool[POOL_FIELDS : POOL_FIELDS + more] = np.arange(size, size + more)[::-1]
    pool[kernels.FREE_ROWS] = free + more
    return arrays._replace(
        nodes=nodes,
        values=_longer(arrays.values, more),
        masks=_longer(arrays.masks, more),
        pool=pool,
        scratch=_longer(arrays.scratch, more),
    )


def _with_children(nodes: Ints, children: int) -> Ints:
    had = (nodes.shape[1] - FIELDS) // 3
    found = np.full((len(nodes), FIELDS + 3 * children), -1, dtype=np.int64)
    found[:, :FIELDS] = nodes[:, :FIELDS]
    for part in range(3):
        begin = FIELDS + part * children
        found[:, begin : begin + had] = nodes[:, FIELDS + part * had : FIELDS + (part + 1) * had]
    return found


def _longer(array: Any, more: int) -> Any:
    return np.concatenate([array, np.zeros((more, *array.shape[1:]), array.dtype)])


def _wider(array: Any, width: int, padding: int) -> Any:
    """With at least so many columns, and twice those that were there."""
    found = np.full((len(array), max(width, 2 * array.shape[1])), padding, dtype=array.dtype)
    found[:, : array.shape[1]] = array
    return found
