"""What several sources of growth are worth beside each other: whose node is whose, and by how much each is off.

Every source says of its nodes how likely the target accepts them, as it sees it: a model by what commits have taught
it, an n-gram trie by counts, a head by its own probabilities. What is submitted is decided by these numbers together,
so one that thinks too well of itself would take the rows of the others. Each source's estimates are therefore moved on
the scale of log odds by what it was wrong by so far, b:

    p' = r p / (1 - p + r p)        r = exp(b)

A trial is a child of a committed token, submitted or not; it is a hit (y = 1) if the next token is its own. After
the trials of a commit (recursive Bayes, Gaussian prior: an extended Kalman filter's step for logistic regression):

    w <- min(w + sum p'(1 - p'), w_most)        b <- b + sum(y - p') / (1 + w)

b is kept for each source and session, and begins with that of the session's kind (greedy, coupled, other), which learns
in the same way from all its sessions. A bound on w forgets.

A node that several sources have grown is one node, with the highest of their corrected estimates, and counts for each.

All of it stands in columns beside the forest's: [slots, 4] and [rows, 4], a column a source by its number. As long as
every node is a model's, whose estimates are calibrated where they are made, nothing here is done at all.
"""

from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from outrider.coordinator.messages import SourceCounts
from outrider.growth_source import GrowthSource

if TYPE_CHECKING:
    from outrider.coordinator.forest import Floats, Forest
    from outrider.coordinator.rows import Ints

_SOURCES = len(GrowthSource) + 1
# Column 0 of the counts, as no source has that number.
_NO_MODEL = 0
# An estimate of 1 could never be corrected.
_MOST, _LEAST = 0.995, 1e-6
# What is learned of a session counts for so many undecided trials (p' = 1/2) at most, of a kind for so many.
_SESSION_WEIGHT, _KIND_WEIGHT = 80 / 4, 800 / 4
# One commit is no reason to turn everything round; and what is never right may yet be some day.
_LONGEST_STEP, _LARGEST_SHIFT = 2.0, 10.0


class Kind(IntEnum):
    """Sessions of which a source's errors are alike."""

    GREEDY = 0
    COUPLED = 1
    OTHER = 2


class Count(IntEnum):
    """What is counted of nodes."""

    DRAFTED = 0
    SUBMITTED = 1
    ACCEPTED = 2


NO_COUNTS: npt.NDArray[np.int64] = np.zeros((len(Count), _SOURCES), dtype=np.int64)


def by_source(totals: tuple[int, int, int], mixed: npt.NDArray[np.int64]) -> list[SourceCounts]:
    """Counts of the sources that have grown anything.

    Args:
        totals: of all nodes, whatever their source, as `Count` has them.
        mixed: [3, 4] as of `SourceMix.counts`.
    """
    counts = mixed.copy()
    counts[:, GrowthSource.MODEL] = np.maximum(np.array(totals) - mixed[:, _NO_MODEL], 0)
    return [SourceCounts(source, *counts[:, source].tolist()) for source in GrowthSource if counts[:, source].any()]


class SourceMix:
    """Of a forest: its nodes' sources and what is known of each source.

    Attributes:
        is_active: whether a node came that is no model's; before that nothing need be told here but `open`.
        counts: [rows, 3, 4] of `Count` and source, without the model's: what no model has grown stands in column 0.
        totals: [3, 4] the same over all rows since the start.
    """

    def __init__(self) -> None:
        self.is_active = False
        self.counts: npt.NDArray[np.int64] = NO_COUNTS[np.newaxis].copy()
        self.totals: npt.NDArray[np.int64] = NO_COUNTS.copy()
        self._kind: Ints = np.zeros(1, dtype=np.int64)
        self._of_rows = _Shifts(1, most=_SESSION_WEIGHT)
        self._of_kinds = _Shifts(len(Kind), most=_KIND_WEIGHT)
        self._estimate: npt.NDArray[np.float32] = np.zeros((0, _SOURCES), dtype=np.float32)
        self._is_expanded: npt.NDArray[np.bool_] = np.zeros(0, dtype=np.bool_)
        self._serial: Ints = np.zeros(0, dtype=np.int64)

    def open(self, row: int, kind: Kind) -> None:
        """A session has begun."""
        while len(self._kind) <= row:
            self.counts = np.concatenate((self.counts, np.zeros_like(self.counts)))
            self._kind = np.concatenate((self._kind, np.zeros_like(self._kind)))
            self._of_rows.grow()
        self.counts[row] = 0
        self._kind[row] = kind
        self._of_rows.shift[row] = self._of_kinds.shift[kind]
        self._of_rows.weight[row] = 0

    def shift(self, row: int) -> dict[GrowthSource, float]:
        """b of a session."""
        return {source: float(self._of_rows.shift[row, source]) for source in GrowthSource}

    # ---------------------------------------------------------------------------------------------------------- growth

    def corrected(self, rows: npt.NDArray[np.integer], sources: "Ints", estimates: "Floats") -> "Floats":
        """p' of n nodes' estimates."""
        return self._of_rows.move(rows.astype(np.int64), sources, np.clip(estimates, _LEAST, _MOST))

    def begin(self, forest: "Forest") -> None:
        """Nodes come that are no model's: all that are there were a model's."""
        if self.is_active:
            return
        self.is_active = True
        there = np.flatnonzero(forest.row)
        self._freshen(forest, there)
        self._estimate[there, GrowthSource.MODEL] = np.clip(forest.acceptance[there], _LEAST, _MOST)
        self._is_expanded[there] = forest.first_child[there] != 0

    def note_grafted(self, forest: "Forest", slots: "Ints", estimates: "Floats", sources: "Ints") -> None:
        """Nodes stand in the forest by now, with the highest of their corrected estimates.

        Args:
            slots: [n] theirs, some maybe twice.
            estimates: [n] as their sources said.
            sources: [n]
        """
        parents = forest.parent[slots[sources == GrowthSource.MODEL]]
        self._freshen(forest, slots)
        self._freshen(forest, parents)
        np.maximum.at(self._estimate, (slots, sources), np.clip(estimates, _LEAST, _MOST).astype(np.float32))
        self._is_expanded[parents] = True

    def _freshen(self, forest: "Forest", slots: "Ints") -> None:
        """What is noted of these slots is of the nodes that are there now: nothing yet where one is new."""
        if (more := len(forest.row) - len(self._serial)) > 0:
            self._serial = np.concatenate((self._serial, np.zeros(more, dtype=np.int64)))
            self._estimate = np.concatenate((self._estimate, np.zeros((more, _SOURCES), dtype=np.float32)))
            self._is_expanded = np.concatenate((self._is_expanded, np.zeros(more, dtype=np.bool_)))
        serial = forest.serial[slots]
        stale = serial != self._serial[slots]
        if stale.any():
            slots = slots[stale]
            self._estimate[slots] = 0
            self._is_expanded[slots] = False
            self._serial[slots] = serial[stale]

    def _estimates(self, forest: "Forest", slots: "Ints") -> npt.NDArray[np.float32]:
        """[n, 4] what each source said of these nodes; 0 where it said nothing."""
        self._freshen(forest, slots)
        return self._estimate[slots]

    def open_shares(self, forest: "Forest", slots: "Ints", offered: "Ints") -> "Floats":
        """What a model's next step would find new below each of n slots, as a share of what may come there.

        All of it below a leaf, nothing where the model has been already; else what the others' children leave.

        Args:
            slots: [n] nodes and roots.
            offered: [m] nodes that are there to be sent.
        """
        estimates = self._estimates(forest, slots)
        covered = np.bincount(forest.parent[offered], weights=forest.acceptance[offered], minlength=len(forest.row))
        shares: Floats = np.clip(1.0 - covered[slots], 0.0, 1.0).astype(np.float64)
        # What only others have grown a model cannot expand before it is committed.
        is_known = (estimates[:, GrowthSource.MODEL] > 0) | (forest.depth[slots] == 0)
        shares[self._is_expanded[slots] | ~is_known] = 0.0
        return shares

    # --------------------------------------------------------------------------------------------------------- counting

    def note_drafted(self, rows: npt.NDArray[np.integer], sources: "Ints") -> None:
        """Nodes have come, or have been found to be there already."""
        other = sources != GrowthSource.MODEL
        if other.any():
            self._count(Count.DRAFTED, np.tile(rows[other], 2), np.concatenate((sources[other], 0 * sources[other])))

    def note_round(self, forest: "Forest", submitted: "Ints", accepted: "Ints") -> None:
        """These nodes were verified, and those of them accepted; before their commit."""
        for count, slots in ((Count.SUBMITTED, submitted), (Count.ACCEPTED, accepted)):
            has = self._estimates(forest, slots) > 0
            has[:, _NO_MODEL] = ~has[:, GrowthSource.MODEL] & has.any(axis=1)
            has[:, GrowthSource.MODEL] = False
            nodes, sources = np.nonzero(has)
            self._count(count, forest.row[slots[nodes]], sources)

    def _count(self, count: Count, rows: npt.NDArray[np.integer], sources: "Ints") -> None:
        size = len(self.counts) * _SOURCES
        more = np.bincount(rows.astype(np.int64) * _SOURCES + sources, minlength=size).reshape(-1, _SOURCES)
        self.counts[:, count] += more
        self.totals[count] += more.sum(axis=0)

    # --------------------------------------------------------------------------------------------------------- learning

    def observe(self, forest: "Forest", roots: "Ints", passed: "Ints", new: "Ints") -> None:
        """Roots are about to move.

        Args:
            forest: still as it was.
            roots: [n] slots where they are.
            passed: [m] tree nodes that are committed by it.
            new: [n] slots where they will be; -1: no node of the tree.
        """
        decided = np.zeros(len(forest.row), dtype=np.bool_)
        decided[roots] = decided[passed] = True
        decided[new[new >= 0]] = False
        hit = np.zeros(len(forest.row), dtype=np.bool_)
        hit[passed] = True
        trials = np.flatnonzero(decided[forest.parent] & (forest.depth > 0))
        told = self._estimates(forest, trials)
        nodes, sources = np.nonzero(told)
        if not len(nodes):
            return
        estimates, hits = told[nodes, sources].astype(np.float64), hit[trials[nodes]]
        rows = forest.row[trials[nodes]].astype(np.int64)
        self._of_rows.learn(rows, sources, estimates, hits)
        self._of_kinds.learn(self._kind[rows], sources, estimates, hits)


class _Shifts:
    """b and w of each source, [n, 4]: a row a session or a kind of them."""

    def __init__(self, rows: int, *, most: float) -> None:
        self.shift: Floats = np.zeros((rows, _SOURCES))
        self.weight: Floats = np.zeros((rows, _SOURCES))
        self._most = most

    def grow(self) -> None:
        """Twice as many rows."""
        self.shift = np.concatenate((self.shift, np.zeros_like(self.shift)))
        self.weight = np.concatenate((self.weight, np.zeros_like(self.weight)))

    def move(self, rows: "Ints", sources: "Ints", estimates: "Floats") -> "Floats":
        """p' of n estimates."""
        odds = np.exp(self.shift[rows, sources])
        return odds * estimates / (1.0 - estimates + odds * estimates)

    def learn(self, rows: "Ints", sources: "Ints", estimates: "Floats", hits: npt.NDArray[np.bool_]) -> None:
        """Takes n trials."""
        expected = self.move(rows, sources, estimates)
        cells, shape = rows * _SOURCES + sources, self.shift.shape
        surplus = np.bincount(cells, weights=hits - expected, minlength=self.shift.size).reshape(shape)
        spread = np.bincount(cells, weights=expected * (1.0 - expected), minlength=self.shift.size).reshape(shape)
        np.minimum(self.weight + spread, self._most, out=self.weight)
        step = np.clip(surplus / (1.0 + self.weight), -_LONGEST_STEP, _LONGEST_STEP)
        np.clip(self.shift + step, -_LARGEST_SHIFT, _LARGEST_SHIFT, out=self.shift)
