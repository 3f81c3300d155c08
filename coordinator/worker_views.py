"""What each draft worker has said of the sessions that it grows, in columns over the forest's rows."""

import numpy as np
import numpy.typing as npt

from outrider.compiled import entries
from outrider.coordinator.growth_kernels import hear_again
from outrider.coordinator.node_ids import NodeIds
from outrider.coordinator.rows import NO_WORKERS, Ints, Rows

_NOT_WANTED = -1


class _Worker:
    """One worker's views.

    Attributes:
        view: [rows] of its node ids; -1 where it grows nothing.
        as_of: [rows] the committed length that it knows of.
    """

    def __init__(self, rows: int) -> None:
        self.view: Ints = np.full(rows, _NOT_WANTED, dtype=np.int64)
        self.as_of: Ints = np.zeros(rows, dtype=np.int64)
        self.sessions = 0

    def grow(self, rows: int) -> None:
        """There are so many rows now."""
        if (more := rows - len(self.view)) > 0:
            self.view = np.concatenate((self.view, np.full(more, _NOT_WANTED, dtype=np.int64)))
            self.as_of = np.concatenate((self.as_of, np.zeros(more, dtype=np.int64)))


class WorkerViews:
    """The views of all workers."""

    def __init__(self, rows: Rows, node_ids: NodeIds) -> None:
        self._rows, self._node_ids = rows, node_ids
        self._workers: dict[str, _Worker] = {}

    def hear(self, worker_id: str, rows: Ints, as_of: Ints, complete: npt.NDArray[np.bool_] | None) -> Ints:
        """Growth of S sessions has come.

        Args:
            rows: [S] 0 where it is not wanted.
            as_of: [S]
            complete: [S]; None: no tree is said to be whole.

        Returns:
            [S] the views that its ids are of; -1 where it is not wanted, or from the future.
        """
        worker = self._worker(worker_id)
        states = self._rows
        if complete is None:
            found, is_only = np.empty(len(rows), dtype=np.int64), len(self._workers) == 1
            said, known = (entries(rows), entries(as_of)), (entries(worker.view), entries(worker.as_of))
            if hear_again(*said, *known, entries(states.length), entries(states.as_of), is_only, entries(found)):
                return found
        views = worker.view.take(rows)
        wanted = (rows > 0) & (as_of <= states.length.take(rows))
        if not wanted.all():
            views[~wanted] = _NOT_WANTED
        new = wanted & (views < 0)
        for place in np.flatnonzero(new).tolist():
            views[place] = self._open(worker, int(rows[place]))
        later = wanted & (as_of > worker.as_of.take(rows))
        if later.any():
            np.maximum.at(worker.as_of, rows[later], as_of[later])
        if (told := new | later).any():
            self._note_as_of(worker, rows[told])
        if complete is not None:
            whole = wanted & complete
            np.maximum.at(states.complete_at, rows[whole], as_of[whole])
        return views

    def forget(self, worker_id: str, row: int) -> None:
        """A worker is gone, or opens the session anew: its ids mean nothing any more."""
        worker = self._workers.get(worker_id)
        if worker is None or row >= len(worker.view) or worker.view[row] < 0:
            return
        self._node_ids.remove_view(int(worker.view[row]))
        worker.view[row] = _NOT_WANTED
        worker.sessions -= 1
        if not worker.sessions:
            del self._workers[worker_id]
        self._rows.as_of[row] = self._least(row)

    def forget_all(self, row: int) -> None:
        """The session has ended."""
        for worker_id in list(self._workers):
            self.forget(worker_id, row)

    def _worker(self, worker_id: str) -> _Worker:
        worker, rows = self._workers.get(worker_id), len(self._rows)
        if worker is None:
            worker = self._workers[worker_id] = _Worker(rows)
        elif len(worker.view) < rows:
            worker.grow(rows)
        return worker

    def _open(self, worker: _Worker, row: int) -> int:
        # One message may name a session twice.
        if worker.view[row] < 0:
            worker.view[row] = self._node_ids.add_view()
            worker.as_of[row] = 0
            worker.sessions += 1
        return int(worker.view[row])

    def _note_as_of(self, worker: _Worker, rows: Ints) -> None:
        if len(self._workers) == 1:
            self._rows.as_of[rows] = worker.as_of[rows]
            return
        for row in rows.tolist():
            self._rows.as_of[row] = self._least(row)

    def _least(self, row: int) -> int:
        """What all workers of the session know of."""
        known = [
            int(worker.as_of[row])
            for worker in self._workers.values()
            if row < len(worker.view) and worker.view[row] >= 0
        ]
        return min(known, default=NO_WORKERS)
