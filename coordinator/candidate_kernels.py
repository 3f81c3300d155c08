"""The best nodes of each session, as loops over the forest's columns.

For where numba is there; without it `candidates.py` does the same with numpy, whole columns at a time.
"""

from typing import Any

import numpy as np

from outrider.compiled import compiled
from outrider.coordinator.forest_kernels import Columns

_NOWHERE = -1
_ONE = int(np.float32(1.0).view(np.int32))
# Where a key's parts begin: 27 bits of slots, 6 of depth.
_DEPTH_AT, _VALUE_AT = 27, 33
_SLOT = (1 << _DEPTH_AT) - 1


@compiled
def best_nodes(columns: Columns, rows: Any, most: Any, deepest: Any, least_deep: int) -> Any:
    """Each session's nodes by falling value, then depth, then slot.

    Args:
        columns: of the forest.
        rows: [S] of the sessions; 0 has none.
        most: [S] how many of each.
        deepest: [S] nodes below that are left out.
        least_deep: nodes below that are left out of all.

    Returns:
        [S + 1] where each session's begin; [n] places, ranks, slots, values, depths, and whether nothing hangs below.
    """
    depth, value, has_children = columns.depth, columns.value, columns.has_children
    place = _places(columns.row, rows, most)
    keys, firsts = _in_order(columns, place, deepest, least_deep, len(most))
    starts, count = np.zeros(len(most) + 1, np.int64), 0
    for session in range(len(most)):
        starts[session + 1] = starts[session] + min(most[session], firsts[session + 1] - firsts[session])
    size = starts[len(most)]
    places, ranks, slots = np.empty(size, np.int64), np.empty(size, np.int64), np.empty(size, np.int64)
    values, depths, is_leaf = np.empty(size), np.empty(size, np.int64), np.empty(size, np.bool_)
    for session in range(len(most)):
        for rank in range(starts[session + 1] - starts[session]):
            slot = keys[firsts[session] + rank] & _SLOT
            places[count], ranks[count], slots[count] = session, rank, slot
            values[count], depths[count], is_leaf[count] = value[slot], depth[slot], not has_children[slot]
            count += 1
    return starts, places, ranks, slots, values, depths, is_leaf


@compiled
def _places(row: Any, rows: Any, most: Any) -> Any:
    """[rows] the session of each; -1 where none of it is asked for."""
    highest = 0
    for slot in range(len(row)):
        highest = max(highest, row[slot])
    for session in range(len(rows)):
        highest = max(highest, rows[session])
    place = np.full(highest + 1, _NOWHERE, np.int64)
    for session in range(len(rows)):
        if rows[session] > 0 and most[session] > 0:
            place[rows[session]] = session
    return place


@compiled
def _in_order(columns: Columns, place: Any, deepest: Any, least_deep: int, sessions: int) -> tuple[Any, Any]:
    """[m] a number for each node, in order within each session; [S + 1] where each session's begin.

    From its high bits to its low: falling value, depth, slot.
    """
    row, depth, value = columns.row, columns.depth, columns.value
    firsts = np.zeros(sessions + 1, np.int64)
    for slot in range(len(row)):
        session = place[row[slot]]
        if session >= 0 and 0 < depth[slot] <= min(deepest[session], least_deep):
            firsts[session + 1] += 1
    for session in range(sessions):
        firsts[session + 1] += firsts[session]
    ends, keys, single = firsts[:-1].copy(), np.empty(firsts[sessions], np.int64), np.empty(1, np.float32)
    # The bits of a float of 0 to 1 are in its order.
    bits = single.view(np.int32)
    for slot in range(len(row)):
        session = place[row[slot]]
        if session >= 0 and 0 < depth[slot] <= min(deepest[session], least_deep):
            single[0] = value[slot]
            keys[ends[session]] = (_ONE - bits[0]) << _VALUE_AT | depth[slot] << _DEPTH_AT | slot
            ends[session] += 1
    for session in range(sessions):
        keys[firsts[session] : firsts[session + 1]].sort()
    return keys, firsts


@compiled
def cut_trees(columns: Columns, starts: Any, slots: Any, values: Any, counts: Any) -> Any:
    """The trees of each session's first so many candidates: their slots, tokens, parents' numbers and values."""
    chosen = counts.sum()
    own, tokens, parents = np.empty(chosen, np.int64), np.empty(chosen, np.int64), np.empty(chosen, np.int64)
    own_values, number = np.empty(chosen), np.zeros(len(columns.row), np.int64)
    token, parent, count = columns.token, columns.parent, 0
    for session in range(len(counts)):
        for rank in range(counts[session]):
            slot = slots[starts[session] + rank]
            number[slot] = rank + 1
            own[count], tokens[count], parents[count] = slot, token[slot], number[parent[slot]]
            own_values[count] = values[starts[session] + rank]
            count += 1
    return own, tokens, parents, own_values
