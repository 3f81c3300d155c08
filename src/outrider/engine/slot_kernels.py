"""Slots of several rows taken and kept, each as one loop.

For where numba is there; without it `kv_slots.py` does the same with numpy, array by array.
"""

from typing import Any

import numpy as np

from outrider.compiled import compiled


@compiled
def take_slots(table: Any, free: Any, free_count: int, columns: Any) -> int:
    """Appends fresh slots to several rows.

    Args:
        table: int32 [rows, length] the slot table.
        free: int32, the stack of free slots.
        free_count: how many there are, enough for all.
        columns: int64 [3, n] of each row: which it is, its length, and how many slots it gets.

    Returns:
        How many free slots are left.
    """
    for place in range(columns.shape[1]):
        row, begin = columns[0, place], columns[1, place]
        for index in range(begin, begin + columns[2, place]):
            free_count -= 1
            table[row, index] = free[free_count]
    return free_count


@compiled
def retain_slots(table: Any, free: Any, free_count: int, columns: Any, kept: Any) -> int:
    """Keeps some slots at the end of several rows, in their order, and frees the others.

    Args:
        table: int32 [rows, length] the slot table.
        free: int32, the stack of free slots.
        free_count: how many there are.
        columns: int64 [5, n] of each row: which it is, index of the first slot in question, slots from there to its
            end, how many of them are kept, and room for whether any of these moved, which is written.
        kept: int64, of each row the offsets of those that are kept, ascending.

    Returns:
        How many free slots there are now; -1, and the table is void, where offsets do not ascend.
    """
    freed = 0
    for place in range(columns.shape[1]):
        freed += columns[2, place] - columns[3, place]
    # The stack's top is to be the first slot that was freed, and so on.
    top, first = free_count + freed, 0
    for place in range(columns.shape[1]):
        row, start, count, size = columns[0, place], columns[1, place], columns[2, place], columns[3, place]
        done = 0
        for offset in range(count):
            slot = table[row, start + offset]
            if done < size and kept[first + done] == offset:
                table[row, start + done] = slot
                done += 1
            else:
                top -= 1
                if top < free_count:
                    return -1
                free[top] = slot
        if done < size:
            return -1
        for offset in range(size, count):
            table[row, start + offset] = -1
        columns[4, place] = kept[first + size - 1] != size - 1
        first += size
    return free_count + freed


def warm_up() -> None:
    """Compiles the loops, or loads what was compiled, before anybody waits for them."""
    table, nothing = np.zeros((1, 1), np.int32), np.zeros(0, np.int64)
    take_slots(table, table[0], 0, np.zeros((3, 0), np.int64))
    retain_slots(table, table[0], 0, np.zeros((5, 0), np.int64), nothing)
