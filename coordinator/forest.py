"""The token trees of all sessions, in columns: what growth adds, what a commit leaves.

One node is one slot: the same place in every column. A draft step's growth, a round's commits and the search for the
best nodes are a few operations on whole columns, whatever the number of sessions; there are no objects to make, to
follow or to collect.

    value of a node = product of the acceptance along its path, the chance that a verification reaches it
    roots and *passed* slots (committed nodes that growth on its way may still name) have a `length`, tree nodes have 0

The sessions are `rows`, workers' names for slots `node_ids`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from outrider.compiled import entries
from outrider.coordinator.commit_kernels import Moving, States, Ways, find_ways, move_roots
from outrider.coordinator.forest_kernels import DEEPEST, FREE, NEXT_SERIAL, Arriving, Columns, Passed, graft_nodes
from outrider.coordinator.node_ids import RING, NodeIds
from outrider.coordinator.rows import Ints, Rows
from outrider.coordinator.source_mix import SourceMix
from outrider.coordinator.worker_views import WorkerViews

Floats = npt.NDArray[np.float64]

_NOWHERE = -1
# A path value may get small, but it is divided by.
_LEAST_VALUE = 1e-300
# Committed tokens whose nodes growth may still name.
MOST_PASSED = 256
_COLUMNS = {
    "row": np.int64,
    "parent": np.int64,
    "token": np.int64,
    "depth": np.int64,
    "length": np.int64,
    "acceptance": np.float64,
    "value": np.float64,
    "first_child": np.int64,
    "next_sibling": np.int64,
    "serial": np.int64,
}


@dataclass(frozen=True, kw_only=True)
class Moves:
    """Tokens that S sessions have committed, each once: appended to their lists already.

    Attributes:
        rows: [S] of the forest.
        counts: [S] tokens of each.
        tokens: [T] session by session.
        accepted: [S] how many of them were submitted nodes, the first ones.
        slots: [A] of these nodes.
        keeps_tree: [S] whether what hangs below the new root is of use; in sync mode every tree is grown afresh.
    """

    rows: Ints
    counts: Ints
    tokens: Ints
    accepted: Ints
    slots: Ints
    keeps_tree: npt.NDArray[np.bool_]

    def only(self, which: npt.NDArray[np.bool_]) -> "Moves":
        """Those of some of the sessions."""
        return Moves(
            rows=self.rows[which],
            counts=self.counts[which],
            tokens=self.tokens[np.repeat(which, self.counts)],
            accepted=self.accepted[which],
            slots=self.slots[np.repeat(which, self.accepted)],
            keeps_tree=self.keeps_tree[which],
        )


class Forest:
    """Slots, rows (sessions) and views (a session's workers).

    Row 0 and slot 0 stand for none.
    """

    row: Ints
    parent: Ints
    token: Ints
    depth: Ints
    length: Ints
    acceptance: Floats
    value: Floats
    first_child: Ints
    next_sibling: Ints
    serial: Ints

    def __init__(self) -> None:
        for name, dtype in _COLUMNS.items():
            setattr(self, name, np.zeros(1, dtype=dtype))
        self._free: Ints = np.zeros(1, dtype=np.int64)
        self._state: Ints = np.array([0, 1, 0])
        self._columns = self._as_columns()
        self.rows = Rows()
        self.node_ids = NodeIds()
        self.views = WorkerViews(self.rows, self.node_ids)
        self.version = 0
        """Counts the changes."""
        self.mix = SourceMix()
        """Which source each node is of, once there are several."""

    @property
    def _deepest(self) -> int:
        """No node is deeper."""
        return int(self._state[DEEPEST])

    # -------------------------------------------------------------------------------------------- sessions and workers

    @property
    def root(self) -> Ints:
        """[rows] slot of each session's root; -1 where it has none."""
        return self.rows.root

    def add_session(self, token: int, length: int) -> int:
        """A row with a root: the last committed token."""
        row = self.rows.add(length)
        self.root[row : row + 1] = self._plant(np.array([row]), np.array([token]), np.array([length]))
        return row

    def remove_session(self, row: int) -> None:
        """Frees all of a row's slots."""
        self.views.forget_all(row)
        self._release(np.flatnonzero(self.row == row))
        self.version += 1
        self.rows.remove(row)

    # ----------------------------------------------------------------------------------------------------------- slots

    def columns(self, count: int) -> Columns:
        """All columns, with room for so many nodes more; what they are changed by is counted in `version`."""
        if self._state[FREE] < count:
            self._enlarge(count)
        return self._columns

    def _as_columns(self) -> Columns:
        own = (getattr(self, name) for name in _COLUMNS)
        return Columns(*map(entries, own), *map(entries, (self._free, self._state)))

    def _enlarge(self, count: int) -> None:
        slots, free = len(self.row), int(self._state[FREE])
        more = max(slots, count, 64)
        for name in _COLUMNS:
            column = getattr(self, name)
            setattr(self, name, np.concatenate((column, np.zeros(more, dtype=column.dtype))))
        spare = np.zeros(slots, dtype=np.int64)
        self._free = np.concatenate((np.arange(slots + more - 1, slots - 1, -1), self._free[:free], spare))
        self._free = self._free[: slots + more]
        self._state[FREE] += more
        self._columns = self._as_columns()

    def _allocate(self, count: int) -> Ints:
        self.columns(count)
        left = int(self._state[FREE]) - count
        taken = self._free[left : left + count].copy()
        self._state[FREE] = left
        serial = int(self._state[NEXT_SERIAL])
        self.serial[taken] = np.arange(serial, serial + count)
        self._state[NEXT_SERIAL] = serial + count
        self.version += 1
        return taken

    def _release(self, slots: Ints) -> None:
        if not len(slots):
            return
        self.row[slots] = 0
        self.depth[slots] = 0
        self.length[slots] = 0
        self.parent[slots] = 0
        self.serial[slots] = 0
        free = int(self._state[FREE])
        self._free[free : free + len(slots)] = slots
        self._state[FREE] = free + len(slots)

    def _plant(self, rows: npt.NDArray[Any], tokens: Sequence[int] | Ints, lengths: Sequence[int] | Ints) -> Ints:
        """Slots of committed tokens that have no parent."""
        slots = self._allocate(len(rows))
        self.row[slots] = rows
        self.token[slots] = tokens
        self.first_child[slots] = 0
        self._stand_alone(slots, lengths)
        return slots

    def _stand_alone(self, slots: npt.NDArray[Any], lengths: Sequence[int] | Ints) -> None:
        """These are committed, so many tokens up to and with each."""
        self.length[slots] = lengths
        self.parent[slots] = slots
        self.depth[slots] = 0
        self.value[slots] = 1.0
        self.acceptance[slots] = 1.0

    # ---------------------------------------------------------------------------------------------------------- growth

    def graft(self, growth: Arriving, passed: Passed) -> bool:
        """Adds nodes below their parents; a child that is there already keeps the higher estimate.

        Returns:
            Whether some of them hang below committed tokens that have to be told (`Passed`) before they can be placed.
        """
        self.version += 1
        return graft_nodes(self.columns(len(growth.place)), self.node_ids.ring, growth, passed, RING) > 0

    # ---------------------------------------------------------------------------------------------------------- commits

    def ways(self, moves: Moves) -> Ways:
        """Where a commit leads; nothing is moved."""
        return find_ways(self._columns, self._states(), _moving(moves))

    def follow(self, moves: Moves) -> None:
        """Moves roots down along a commit's tokens, and drops what hangs elsewhere; for where loops are compiled."""
        move_roots(self.columns(len(moves.rows)), self._states(), _moving(moves), MOST_PASSED, _LEAST_VALUE)
        self.version += 1

    def move_roots(self, moves: Moves, ways: Ways) -> None:
        """The same in operations on whole columns; `ways`: where the commit leads."""
        rows, states = moves.rows, self.rows
        lengths = states.length[rows] + moves.counts
        states.was_drafted[rows] = ways.new >= 0
        states.was_missed[rows] = (self.first_child[ways.reached] != 0) & (ways.new < 0)
        new = np.where(moves.keeps_tree, ways.new, _NOWHERE)
        kept = new >= 0
        scale, shift = np.ones(len(self.root)), np.zeros(len(self.root), dtype=np.int64)
        # Where a path was too unlikely for a float, its nodes stay at next to nothing.
        scale[rows[kept]] = 1.0 / np.maximum(self.value[new[kept]], _LEAST_VALUE)
        shift[rows[kept]] = self.depth[new[kept]]
        if not kept.all():
            tokens = moves.tokens[np.cumsum(moves.counts) - 1]
            new[~kept] = self._plant(rows[~kept], tokens[~kept], lengths[~kept])
        self._stand_alone(np.concatenate((ways.passed, new)), np.concatenate((ways.passed_lengths, lengths)))
        self.root[rows] = new
        states.length[rows] = lengths
        self._drop_dead(rows, lengths)
        below = self.depth > 0
        np.multiply(self.value, scale[self.row], out=self.value, where=below)
        np.subtract(self.depth, shift[self.row], out=self.depth, where=below)
        self._state[DEEPEST] = self.depth.max()
        self.version += 1

    def _states(self) -> States:
        rows = self.rows
        return States(rows.root, rows.length, rows.as_of, rows.was_drafted, rows.was_missed)

    def _drop_dead(self, rows: Ints, lengths: Ints) -> None:
        top = self.parent
        for _ in range(self._deepest.bit_length()):
            top = top[top]
        root = self.root[self.row]
        forgotten = np.zeros(len(self.root), dtype=np.int64)
        forgotten[rows] = np.maximum(np.minimum(self.rows.as_of[rows], lengths - 1), lengths - MOST_PASSED)
        off_path = (self.depth > 0) & (top != root)
        left_behind = (self.length > 0) & (self.length <= forgotten[self.row])
        self._release(np.flatnonzero(off_path | left_behind))


def _moving(moves: Moves) -> Moving:
    return Moving(moves.rows, moves.counts, moves.tokens, moves.accepted, moves.slots, moves.keeps_tree)
