"""The best nodes of each session, as loops over the forest's columns.

For where numba is there; without it `candidates.py` does the same with numpy, whole columns at a time.
"""

from typing import Any

import numpy as np

from outrider.compiled import compiled
from outrider.coordinator.forest_kernels import Columns

_NOWHERE = -1


@compiled
def gather_keys(  # noqa: PLR0917
    columns: Columns, falling: Any, rows: Any, most: Any, deepest: Any, shifts: tuple[int, int, int]
) -> Any:
    """[m] a number for each node that may be a candidate: session, falling value, depth and slot, from high to low.

    Args:
        columns: of the forest.
        falling: [slots] values as whole numbers, the highest value's the smallest.
        rows: [S] of the sessions; 0 has none.
        most: [S] how many of each; of a session without any, none is looked at.
        deepest: [S] nodes below that are left out.
        shifts: bits below session, value and depth.
    """
    row, depth = columns.row, columns.depth
    place, count = _places(row, rows, most), 0
    keys = np.empty(len(row), np.int64)
    for slot in range(len(row)):
        session = place[row[slot]]
        if session >= 0 and 0 < depth[slot] <= deepest[session]:
            keys[count] = session << shifts[0] | falling[slot] << shifts[1] | depth[slot] << shifts[2] | slot
            count += 1
    return keys[:count]


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
def spread_keys(columns: Columns, keys: Any, most: Any, shifts: tuple[int, int, int]) -> Any:
    """What sorted keys stand for: [S + 1] starts, then [n] places, ranks, slots, values, depths, leaves."""
    starts = np.zeros(len(most) + 1, np.int64)
    places, ranks, slots = np.empty(len(keys), np.int64), np.empty(len(keys), np.int64), np.empty(len(keys), np.int64)
    depths, values, is_leaf = np.empty(len(keys), np.int64), np.empty(len(keys)), np.empty(len(keys), np.bool_)
    depth, value, has_children = columns.depth, columns.value, columns.has_children
    count = 0
    for number in range(len(keys)):
        session, slot = keys[number] >> shifts[0], keys[number] & ((1 << shifts[2]) - 1)
        rank = starts[session + 1]
        if rank >= most[session]:
            continue
        starts[session + 1] = rank + 1
        places[count], ranks[count], slots[count] = session, rank, slot
        depths[count], values[count], is_leaf[count] = depth[slot], value[slot], not has_children[slot]
        count += 1
    for session in range(len(most)):
        starts[session + 1] += starts[session]
    return starts, places[:count], ranks[:count], slots[:count], values[:count], depths[:count], is_leaf[:count]


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
