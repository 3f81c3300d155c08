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
def best_nodes(columns: Columns, all_rows: int, rows: Any, most: Any, deepest: Any, least_deep: int) -> Any:  # noqa: PLR0917
    """Each session's nodes by falling value, then depth, then slot.

    Args:
        columns: of the forest.
        all_rows: that there are.
        rows: [S] of the sessions; 0 has none.
        most: [S] how many of each.
        deepest: [S] nodes below that are left out.
        least_deep: nodes below that are left out of all.

    Returns:
        [S + 1] where each session's begin; [n] places, ranks, slots, values, depths, and whether nothing hangs below.
    """
    depth, value, first_child = columns.depth, columns.value, columns.first_child
    place, deep = np.full(all_rows, _NOWHERE, np.int64), np.empty(len(rows), np.int64)
    for session in range(len(rows)):
        deep[session] = min(deepest[session], least_deep)
        if rows[session] > 0 and most[session] > 0:
            place[rows[session]] = session
    keys, firsts = _in_order(columns, place, deep)
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
            values[count], depths[count], is_leaf[count] = value[slot], depth[slot], first_child[slot] == 0
            count += 1
    return starts, places, ranks, slots, values, depths, is_leaf


@compiled
def _in_order(columns: Columns, place: Any, deepest: Any) -> tuple[Any, Any]:
    """[m] a number for each node, in order within each session; [S + 1] where each session's begin.

    From its high bits to its low: falling value, depth, slot.

    Args:
        columns: of the forest.
        place: [rows] the session of each; -1 where none of it is asked for.
        deepest: [S] nodes below that are left out.
    """
    row, depth, value, sessions = columns.row, columns.depth, columns.value, len(deepest)
    firsts, found, met = np.zeros(sessions + 1, np.int64), np.empty(len(row), np.int64), 0
    for slot in range(len(row)):
        if depth[slot] > 0:
            session = place[row[slot]]
            if session >= 0 and depth[slot] <= deepest[session]:
                firsts[session + 1] += 1
                found[met] = slot
                met += 1
    for session in range(sessions):
        firsts[session + 1] += firsts[session]
    ends, keys, single = firsts[:-1].copy(), np.empty(met, np.int64), np.empty(1, np.float32)
    # The bits of a float of 0 to 1 are in its order.
    bits = single.view(np.int32)
    for number in range(met):
        slot = found[number]
        session = place[row[slot]]
        single[0] = value[slot]
        keys[ends[session]] = (_ONE - bits[0]) << _VALUE_AT | depth[slot] << _DEPTH_AT | slot
        ends[session] += 1
    for session in range(sessions):
        keys[firsts[session] : firsts[session + 1]].sort()
    return keys, firsts


@compiled
def cut_trees(columns: Columns, starts: Any, slots: Any, values: Any, depths: Any, counts: Any) -> Any:  # noqa: PLR0917
    """The trees of each session's first so many candidates: their slots, tokens, parents' numbers and values."""
    chosen = counts.sum()
    own, tokens, parents = np.empty(chosen, np.int64), np.empty(chosen, np.int64), np.empty(chosen, np.int64)
    # Read only where it has been written: whatever hangs below a node comes after it.
    own_values, number = np.empty(chosen), np.empty(len(columns.row), np.int64)
    token, parent, count = columns.token, columns.parent, 0
    for session in range(len(counts)):
        for rank in range(counts[session]):
            at = starts[session] + rank
            slot = slots[at]
            number[slot] = rank + 1
            own[count], tokens[count], own_values[count] = slot, token[slot], values[at]
            parents[count] = number[parent[slot]] if depths[at] > 1 else 0
            count += 1
    return own, tokens, parents, own_values
