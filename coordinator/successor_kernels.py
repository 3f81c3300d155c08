"""The nodes that are sent for a batch that follows a step, as one loop: growth comes often, and the step ends soon.

Shapes: S sessions, n candidates, N nodes that are sent.
"""

from typing import Any

import numpy as np

from outrider.compiled import compiled
from outrider.coordinator.forest_kernels import Columns


@compiled
def number_new(  # noqa: PLR0917
    columns: Columns,
    starts: Any,
    slots: Any,
    number: Any,
    serial: Any,
    value: Any,
    verified: Any,
    sent: Any,
    most: int,
) -> Any:
    """Gives numbers to the candidates that have none, but for those that could only be a new root and have no children.

    Args:
        columns: of the forest.
        starts: [S + 1] where each session's candidates begin.
        slots: [n] theirs; the best of each session first, parents before children.
        number: [slots] numbers that a target knows nodes by; they get those of the new ones.
        serial: [slots] serials of the nodes that have them: a slot with another one is another node's by now.
        value: float32 [slots] path values with which nodes were sent.
        verified: [S] nodes that the step verifies: numbers 1 to that.
        sent: [S] nodes that were sent before: the numbers behind these.
        most: nodes of all sessions together; the best of them.

    Returns:
        [S] nodes of each, and [N] slots, tokens, parents' numbers and float32 values, no higher than the parents' were.
    """
    parent, depth, own_value, serials = columns.parent, columns.depth, columns.value, columns.serial
    has_children, is_new, new = np.zeros(len(parent), np.bool_), np.zeros(len(slots), np.bool_), 0
    for place in range(len(slots)):
        slot = slots[place]
        if number[slot] == 0 or serial[slot] != serials[slot]:
            is_new[place] = has_children[parent[slot]] = True
            new += 1
    floor = 0.0
    if new > most:
        worth, met = np.empty(new), 0
        for place in range(len(slots)):
            if is_new[place]:
                worth[met] = own_value[slots[place]]
                met += 1
        worth.sort()
        floor = worth[new - most]
    counts, found = np.zeros(len(starts) - 1, np.int64), 0
    of, tokens, parents = np.empty(new, np.int64), np.empty(new, np.int64), np.empty(new, np.int64)
    values = np.empty(new, np.float32)
    for session in range(len(starts) - 1):
        for place in range(starts[session], starts[session + 1]):
            slot = slots[place]
            above = parent[slot]
            if not is_new[place] or found == most or own_value[slot] < floor:
                continue
            above_number = number[above] if serial[above] == serials[above] else 0
            is_below_root = depth[above] == 0
            # What hangs below a node that was left out is left out as well.
            if (above_number == 0 and not is_below_root) or (
                (is_below_root or above_number <= verified[session]) and not has_children[slot]
            ):
                continue
            worth_now = np.float32(own_value[slot])
            if above_number > verified[session]:
                worth_now = min(worth_now, value[above])
            counts[session] += 1
            number[slot], serial[slot] = verified[session] + sent[session] + counts[session], serials[slot]
            value[slot] = worth_now
            of[found], tokens[found], parents[found], values[found] = slot, columns.token[slot], above_number, worth_now
            found += 1
    return counts, of[:found], tokens[:found], parents[:found], values[:found]
