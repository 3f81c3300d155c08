"""A growth step's columns packed into its bytes, as one loop.

For where numba is there; without it `draft_staging.py` does the same with numpy, array by array.

Shapes: as in `outrider.engine.draft_staging`.
"""

from typing import Any

import numpy as np

from outrider.compiled import compiled
from outrider.engine import slot_kernels

ARRAYS = (
    "token_ids", "write_slots", "tree_mask", "positions", "prefix_len", "rows", "query_start", "tree_start", "key_len",
    "logit_rows", "update_rows", "update_columns", "update_slots", "seeds", "choice_positions", "top_k", "choice_index",
    "temperature", "top_p", "min_p",
)  # fmt: skip
"""What is packed, in the order in which `places` says where each lies."""

# 32-bit words of a `SamplingSpec.record`, and which of them are what.
_RECORD, _TEMPERATURE, _TOP_P, _MIN_P, _TOP_K, _CHOICE_INDEX = 8, 2, 3, 4, 5, 6


@compiled
def pack_growth(  # noqa: PLR0917
    width: int,
    sessions: Any,
    changes: Any,
    rows: Any,
    wanted: Any,
    masks: Any,
    records: Any,
    table: Any,
    places: Any,
    template: Any,
    data: Any,
    words: Any,
) -> int:
    """Packs a step.

    Args:
        width: words of a mask.
        sessions: int64 [4, S]: rows of the slot table, tree starts, key lengths, counts.
        changes: int64 [2 S]: first index that has changed of each session, and behind the last one.
        rows: int64 [4, T]: tokens, positions, key indices and prefix lengths.
        wanted: int64 [R] rows.
        masks: int64 [T * words].
        records: int32 [R * 8].
        table: [rows, length] the slot table.
        places: [arrays] the first byte of each of `ARRAYS`, and how many entries of the slot table have room.
        template: int64, a step of nothing.
        data: int64, the step's bytes.
        words: the same as int32.

    Returns:
        How many entries of the slot table have changed, -1 where a row writes to a slot that was not reserved.
    """
    count, total = sessions.shape[1], rows.shape[1]
    data[:] = template
    tokens, slots, mask = places[0] // 8, places[1] // 8, places[2] // 8
    positions, prefixes = places[3] // 4, places[4] // 4
    starts, begin, changed = places[6] // 4, 0, 0
    for session in range(count):
        row, of_session = sessions[0, session], sessions[3, session]
        words[places[5] // 4 + session] = row
        words[places[7] // 4 + session] = sessions[1, session]
        words[places[8] // 4 + session] = sessions[2, session]
        for number in range(begin, begin + of_session):
            slot = table[row, rows[2, number]]
            if slot < 0:
                return -1
            data[slots + number] = slot
            data[tokens + number] = rows[0, number]
            words[positions + number] = rows[1, number]
            words[prefixes + number] = rows[3, number]
        begin += of_session
        words[starts + 1 + session] = begin
        for index in range(changes[session], changes[count + session]):
            if changed < places[len(ARRAYS)]:
                words[places[10] // 4 + changed] = row
                words[places[11] // 4 + changed] = index
                words[places[12] // 4 + changed] = table[row, index]
            changed += 1
    for place in range(starts + 1 + count, places[7] // 4):
        words[place] = total
    data[mask : mask + total * width] = masks
    _pack_sampling(rows, wanted, records, places, data, words)
    return changed


@compiled
def _pack_sampling(rows: Any, wanted: Any, records: Any, places: Any, data: Any, words: Any) -> None:  # noqa: PLR0917
    """Of the wanted rows: which they are, and how each is sampled."""
    for number in range(len(wanted)):
        row, record = wanted[number], _RECORD * number
        data[places[9] // 8 + number] = row
        words[places[14] // 4 + number] = rows[1, row] + 1
        words[places[13] // 4 + 2 * number] = records[record]
        words[places[13] // 4 + 2 * number + 1] = records[record + 1]
        words[places[15] // 4 + number] = records[record + _TOP_K]
        words[places[16] // 4 + number] = records[record + _CHOICE_INDEX]
        words[places[17] // 4 + number] = records[record + _TEMPERATURE]
        words[places[18] // 4 + number] = records[record + _TOP_P]
        words[places[19] // 4 + number] = records[record + _MIN_P]


def warm_up() -> None:
    """Compiles what steps go through, or loads what was compiled, before anybody waits for it."""
    slot_kernels.warm_up()
    nothing, columns = np.zeros(1, np.int64), np.zeros((4, 0), np.int64)
    none, table = nothing[:0], np.zeros((1, 1), np.int32)
    places = np.zeros(len(ARRAYS) + 1, np.int64)
    pack_growth(
        1, columns, none, columns, none, none, table[0, :0], table, places, nothing, nothing, table[0]
    )  # fmt: skip
