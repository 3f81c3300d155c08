"""What rounds and growth ask of all sessions at once, in columns: one row a session.

A message of growth or a step's result is about dozens of sessions. What it reads and writes of each is an entry of a
column here, so that it takes a few operations for all of them together. Row 0 stands for none.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

_NOWHERE = -1
NO_WORKERS = int(np.iinfo(np.int64).max)
_COLUMNS: dict[str, tuple[type, Any]] = {
    "root": (np.int64, _NOWHERE),
    "length": (np.int64, 0),
    "as_of": (np.int64, NO_WORKERS),
    "complete_at": (np.int64, _NOWHERE),
    "unanswered": (np.int64, 0),
    "draft": (np.int64, 0),
    "draft_epoch": (np.int64, 0),
    "committed_ns": (np.int64, 0),
    "told_ns": (np.int64, 0),
    "was_drafted": (np.bool_, False),
    "was_missed": (np.bool_, False),
}


class Rows:
    """The columns, each with an entry a row.

    Attributes:
        root: the forest's slot of the last committed token; -1 where there is no tree.
        length: committed tokens.
        as_of: what all its draft workers know of.
        complete_at: the longest length at which a worker said that the tree of the round is whole (sync mode).
        unanswered: commits since a draft last showed that it knows all.
        draft: number of the one draft that grows its tree; 0 where none does, -1 where there may be several.
        draft_epoch: of the session at the one draft.
        committed_ns: when tokens were last committed, or the session was placed.
        told_ns: when tokens were last committed; 0 before the first. Who reads waits on, over the loss of a target.
        was_drafted: whether the root was a node of the tree before it was committed: a draft may be expanding it.
        was_missed: whether its parent had been expanded, and it was none of the children.
    """

    root: Ints
    length: Ints
    as_of: Ints
    complete_at: Ints
    unanswered: Ints
    draft: Ints
    draft_epoch: Ints
    committed_ns: Ints
    told_ns: Ints
    was_drafted: npt.NDArray[np.bool_]
    was_missed: npt.NDArray[np.bool_]

    def __init__(self) -> None:
        for name, (dtype, empty) in _COLUMNS.items():
            setattr(self, name, np.full(1, empty, dtype=dtype))
        self.free: list[int] = []

    def __len__(self) -> int:
        return len(self.root)

    def add(self, length: int) -> int:
        """A row for a session that has so many tokens."""
        if not self.free:
            rows = len(self)
            for name, (dtype, empty) in _COLUMNS.items():
                setattr(self, name, np.concatenate((getattr(self, name), np.full(rows, empty, dtype=dtype))))
            self.free = list(range(2 * rows - 1, rows - 1, -1))
        row = self.free.pop()
        for name, (_, empty) in _COLUMNS.items():
            getattr(self, name)[row] = empty
        self.length[row] = length
        return row

    def remove(self, row: int) -> None:
        """The session has ended."""
        self.root[row] = _NOWHERE
        self.free.append(row)
