"""Reports of steps: new nodes for the coordinator, and trials for the calibration.

The trees are the device's. Of each expanded node only the ranked children are kept here, until commits tell which of
them was right: by session and node id, their tokens, calibration buckets and the ids of those that became nodes. Ids of
a session rise, so a ring over the id is enough: what is overwritten is lost to the calibration and to nothing else.

Shapes: S sessions, E ids that are told apart, K children of a node, L rows with children of a step, n new nodes, P
sessions with new nodes.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from outrider.kernels.compiled import compiled

_IDS = 1024
_NONE, _ROOT = -1, 0

Ints = npt.NDArray[np.int32]


class Expansions:
    """The children of expanded nodes.

    Args:
        lines: L of the largest step.
        branching: K.
    """

    def __init__(self, sessions: int, lines: int, branching: int) -> None:
        self._lines, self._branching = lines, branching
        # The node's id, then tokens, buckets and made ids of its children. Id 0 is a root that had no children when it
        # became the root.
        self._table = np.full((sessions, _IDS, 1 + 3 * branching), _NONE, np.int32)
        # last_ids: [S] highest id of each session's nodes since it was cleared; 0 if it has had none.
        self._roots, self.last_ids = np.zeros(sessions, np.int32), np.zeros(sessions, np.int32)
        self._nodes = np.empty((3, lines * branching), np.int32)
        self._acceptances = np.empty(lines * branching, np.float32)
        self._sessions = np.empty((3, lines), np.int32)
        self._counts = np.zeros(2, np.int64)

    def clear(self, row: int) -> None:
        """Forget a session."""
        self._table[row] = _NONE
        self._roots[row], self.last_ids[row] = _ROOT, 0

    def drop_tree(self, row: int) -> None:
        """Begin anew below the root; ids go on."""
        self._roots[row] = _ROOT

    def read(
        self, words: Ints, count: int, is_sent: npt.NDArray[np.bool_], ids_used: Ints
    ) -> tuple[Ints, Ints, npt.NDArray[Any]]:
        """Remember the children of a step's nodes, and return those that became nodes.

        Args:
            words: columns of the report, as `report_children` lays them out.
            count: rows of it that are in use.
            is_sent: [S] sessions whose new nodes are returned.
            ids_used: [S] what is added to the ids of returned nodes.

        Returns:
            Rows of the pool, lengths and counts [3, P] of sessions with new nodes; ids, parents' ids and tokens [3, n];
            acceptances [n]. All are overwritten by the next call.
        """
        counts = self._counts
        arrays = words, words.view(np.float32), is_sent, ids_used, self._table, self.last_ids
        outputs = self._sessions, self._nodes, self._acceptances, counts
        _read(self._lines, count, self._branching, arrays + outputs)
        sessions, nodes = counts.tolist()
        return self._sessions[:, :sessions], self._nodes[:, :nodes], self._acceptances[:nodes]

    def commit(self, row: int, token_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Move a session's root along committed tokens.

        Returns:
            [n, 2 + K] int64, for each node on the way that was expanded: which child was committed (-1: none), how many
            there are, and their buckets; as `AcceptanceCalibration.observe_parents` takes it.
        """
        return _walk(self._table[row], self._roots[row : row + 1], self._branching, token_ids)


@compiled
def _read(lines: int, count: int, branching: int, arrays: Any) -> None:
    # One tuple: numba unpacks it in half the time.
    words, floats, is_sent, ids_used, table, last_ids, sessions, nodes, acceptances, counts = arrays
    wide = lines * branching
    first, total, number, last = 3 * lines, 0, 0, -1
    for line in range(count):
        row, parent = words[line], words[2 * lines + line]
        place = parent & (_IDS - 1)
        table[row, place, 0] = parent
        if is_sent[row] and row != last:
            # A session without new nodes gives its place to the next one.
            if number == 0 or sessions[2, number - 1] > 0:
                number += 1
            sessions[0, number - 1], sessions[1, number - 1], sessions[2, number - 1] = row, words[lines + line], 0
            last = row
        for rank in range(branching):
            child = first + line * branching + rank
            token, made = words[child], words[child + 2 * wide]
            table[row, place, 1 + rank], table[row, place, 1 + 2 * branching + rank] = token, made
            table[row, place, 1 + branching + rank] = words[child + wide]
            last_ids[row] = max(last_ids[row], made)
            if made > 0 and is_sent[row]:
                above = parent + ids_used[row] if parent > 0 else 0
                nodes[0, total], nodes[1, total], nodes[2, total] = made + ids_used[row], above, token
                acceptances[total] = floats[child + 3 * wide]
                sessions[2, number - 1] += 1
                total += 1
    if number > 0 and sessions[2, number - 1] == 0:
        number -= 1
    counts[0], counts[1] = number, total


@compiled
def _walk(table: Any, root: Any, branching: int, token_ids: Any) -> Any:
    seen = np.empty((len(token_ids), 2 + branching), np.int64)
    count, node = 0, int(root[0])
    place = node & (_IDS - 1)
    if table[place, 0] != node:
        place, node = 0, 0
    for token in token_ids:
        if node < 0 or table[place, 0] != node:
            # Unexpanded: no child of it has an id.
            node = -1
            break
        hit, children = -1, 0
        for rank in range(branching):
            if table[place, 1 + rank] == token:
                hit = rank
            if table[place, 1 + rank] >= 0:
                children = rank + 1
        if table[place, 1 + branching] >= 0:
            seen[count, 0], seen[count, 1] = hit, children
            for rank in range(branching):
                seen[count, 2 + rank] = table[place, 1 + branching + rank]
            count += 1
        node = int(table[place, 1 + 2 * branching + hit]) if hit >= 0 else -1
        node = node if node > 0 else -1
        place = node & (_IDS - 1)
    if table[0, 0] == 0:
        table[0, 0] = -1
    root[0] = max(node, 0)
    return seen[:count]


def warm_up() -> None:
    """Compile the loops, or load what was compiled, before anybody waits for them."""
    expansions = Expansions(1, 1, 1)
    expansions.read(np.zeros(7, np.int32), 0, np.zeros(1, np.bool_), np.zeros(1, np.int32))
    expansions.commit(0, np.zeros(1, np.int64))
