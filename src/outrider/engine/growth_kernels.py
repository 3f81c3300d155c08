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
    sizes: tuple[int, int, int, int],
    columns: Any,
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
        sizes: S, T, R and the words of a mask.
        columns: int64: rows, tree starts, key lengths, counts, first and last changed index of S sessions each; tokens,
            positions, key indices and prefix lengths of T rows each; R wanted rows.
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
    count, total, ranked, width = sizes
    data[:] = template
    of_row = 6 * count
    tokens, slots, mask = places[0] // 8, places[1] // 8, places[2] // 8
    positions, prefixes = places[3] // 4, places[4] // 4
    starts, begin, changed = places[6] // 4, 0, 0
    for session in range(count):
        row, rows = columns[session], columns[3 * count + session]
        words[places[5] // 4 + session] = row
        words[places[7] // 4 + session] = columns[count + session]
        words[places[8] // 4 + session] = columns[2 * count + session]
        for number in range(begin, begin + rows):
            slot = table[row, columns[of_row + 2 * total + number]]
            if slot < 0:
                return -1
            data[slots + number] = slot
            data[tokens + number] = columns[of_row + number]
            words[positions + number] = columns[of_row + total + number]
            words[prefixes + number] = columns[of_row + 3 * total + number]
        begin += rows
        words[starts + 1 + session] = begin
        for index in range(columns[4 * count + session], columns[5 * count + session]):
            if changed < places[len(ARRAYS)]:
                words[places[10] // 4 + changed] = row
                words[places[11] // 4 + changed] = index
                words[places[12] // 4 + changed] = table[row, index]
            changed += 1
    for place in range(starts + 1 + count, places[7] // 4):
        words[place] = total
    data[mask : mask + total * width] = masks
    _pack_sampling(ranked, columns, of_row + total, of_row + 4 * total, records, places, data, words)
    return changed


@compiled
def _pack_sampling(  # noqa: PLR0917
    ranked: int, columns: Any, positions: int, wanted: int, records: Any, places: Any, data: Any, words: Any
) -> None:
    """Of the wanted rows: which they are, and how each is sampled."""
    for number in range(ranked):
        row, record = columns[wanted + number], _RECORD * number
        data[places[9] // 8 + number] = row
        words[places[14] // 4 + number] = columns[positions + row] + 1
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
    nothing = np.zeros(1, np.int64)
    table = np.zeros((1, 1), np.int32)
    places = np.zeros(len(ARRAYS) + 1, np.int64)
    pack_growth((0, 0, 0, 1), nothing, _none(np.int64), _none(np.int32), table, places, nothing, nothing, table[0])


def _none(dtype: type[np.generic]) -> Any:
    """What is read of bytes has a type of its own: it cannot be written."""
    return np.frombuffer(b"", dtype=dtype)
