"""The usual step packed into its bytes, and its answer read, each as one loop.

For where numba is there; without it `step_trees.py` does the same with numpy, array by array. This lies between two
steps on the device, which waits for it, and with few sessions numpy's time is that of its calls.

Shapes: as in `outrider.engine.step_trees`.
"""

from typing import Any

import numpy as np

from outrider.compiled import compiled

ARRAYS = (
    "token_ids", "write_slots", "tree_mask", "positions", "prefix_len", "rows", "query_start", "tree_start", "key_len",
    "logit_rows", "update_rows", "update_columns", "update_slots", "seeds", "choice_positions", "top_k", "choice_index",
    "temperature", "top_p", "min_p", "candidates", "tree_rows", "first_child", "next_sibling",
)  # fmt: skip
"""What is packed, in the order in which `places` says where each lies."""

# 32-bit words of a `SamplingSpec.record`, and which of them are what.
_RECORD, _TEMPERATURE, _TOP_P, _MIN_P, _TOP_K, _CHOICE_INDEX = 8, 2, 3, 4, 5, 6
# Columns of a tree, and of one's changes in the slot table.
_ROW, _ROOT, _LAST, _COUNT, _BEGIN, _END = 0, 1, 2, 3, 4, 5


@compiled
def are_trees(counts: Any, roots: Any, tokens: Any, parents: Any, vocab_size: int) -> bool:
    """Whether nodes are tokens of the model's, and parents stand before their children.

    Args:
        counts: int64 [bs]
        roots: int64 [bs] their tokens.
        tokens: int64 [T]; those of roots are written.
        parents: int64 [T]
        vocab_size: of the model.
    """
    first = 0
    for tree in range(len(counts)):
        tokens[first] = roots[tree]
        for number in range(1, counts[tree]):
            row = first + number
            if not (0 <= tokens[row] < vocab_size and 0 <= parents[row] < number):
                return False
        first += counts[tree]
    return True


@compiled
def pack_trees(  # noqa: PLR0917
    sizes: tuple[int, int],
    columns: Any,
    tokens: Any,
    parents: Any,
    records: Any,
    table: Any,
    places: Any,
    template: Any,
    data: Any,
    words: Any,
) -> int:
    """Packs a step.

    Args:
        sizes: words of a mask, and rows of a tree that the bucket has room for.
        columns: int64 [6, bs] of each tree: row of the table, key index of the root, highest position, rows, and first
            and last changed index of its row of the table.
        tokens: int64 [T]
        parents: int64 [T] node numbers, 0 for roots.
        records: int32 [bs * 8].
        table: [rows, length] the slot table.
        places: [arrays] the first byte of each of `ARRAYS`, how many entries of the slot table have room, and how many
            sessions the bucket has.
        template: int64, a step of nothing.
        data: int64, the step's bytes.
        words: the same as int32.

    Returns:
        How many entries of the slot table have changed, -1 where a row writes to a slot that was not reserved.
    """
    width, room = sizes
    count, total = columns.shape[1], len(tokens)
    data[:] = template
    starts = places[6] // 4
    lasts = np.empty(room, np.int64)
    depths = np.empty(room, np.int64)
    first, changed = 0, 0
    for tree in range(count):
        row, root, rows = columns[_ROW, tree], columns[_ROOT, tree], columns[_COUNT, tree]
        words[places[5] // 4 + tree] = row
        words[places[7] // 4 + tree] = root
        words[places[8] // 4 + tree] = root + rows
        own, depths[0] = tree * room, 0
        for number in range(rows):
            place = first + number
            slot = table[row, root + number]
            if slot < 0:
                return -1
            data[places[1] // 8 + place] = slot
            data[places[0] // 8 + place] = tokens[place]
            data[places[9] // 8 + place] = place
            words[places[4] // 4 + place] = root
            words[places[21] // 4 + own + number] = place
            mask = places[2] // 8 + place * width
            if number:
                parent = parents[place]
                depths[number] = depths[parent] + 1
                above = places[2] // 8 + (first + parent) * width
                for word in range(width):
                    data[mask + word] = data[above + word]
                words[places[20] // 4 + own + number] = tokens[place]
                if words[places[22] // 4 + own + parent] < 0:
                    words[places[22] // 4 + own + parent] = number
                else:
                    words[places[23] // 4 + own + lasts[parent]] = number
                lasts[parent] = number
            data[mask + (number >> 6)] |= np.int64(1) << np.int64(number & 63)
            words[places[3] // 4 + place] = min(root + depths[number], columns[_LAST, tree])
            words[places[14] // 4 + place] = root + depths[number] + 1
        _pack_sampling(tree, first, rows, records, places, data, words)
        first += rows
        words[starts + 1 + tree] = first
        for index in range(columns[_BEGIN, tree], columns[_END, tree]):
            if changed < places[24]:
                words[places[10] // 4 + changed] = row
                words[places[11] // 4 + changed] = index
                words[places[12] // 4 + changed] = table[row, index]
            changed += 1
    for tree in range(count, places[25]):
        words[starts + 1 + tree] = total
    return changed


@compiled
def _pack_sampling(  # noqa: PLR0917
    tree: int, first: int, rows: int, records: Any, places: Any, data: Any, words: Any
) -> None:
    """How a tree's rows are sampled."""
    record = _RECORD * tree
    for place in range(first, first + rows):
        words[places[13] // 4 + 2 * place] = records[record]
        words[places[13] // 4 + 2 * place + 1] = records[record + 1]
        words[places[15] // 4 + place] = records[record + _TOP_K]
        words[places[16] // 4 + place] = records[record + _CHOICE_INDEX]
        words[places[17] // 4 + place] = records[record + _TEMPERATURE]
        words[places[18] // 4 + place] = records[record + _TOP_P]
        words[places[19] // 4 + place] = records[record + _MIN_P]


@compiled
def read_walks(words: Any, logit_rows: int, sessions: int, nodes: int, trees: int) -> tuple[Any, Any, Any]:
    """The walks that a step's answer tells of.

    Args:
        words: int32: predictions of the rows, paths of the bucket's sessions, and how many nodes each accepted.
        logit_rows: rows of the bucket.
        sessions: of the bucket.
        nodes: rows of a tree of the bucket.
        trees: of the step.

    Returns:
        As in `StepAnswer`: tokens and rows [trees, m], which past a path's end mean nothing, and accepted [trees].
    """
    accepted = words[logit_rows + sessions * nodes :][:trees].copy()
    width = 1
    for tree in range(trees):
        width = max(width, accepted[tree] + 1)
    tokens, rows = np.zeros((trees, width), np.int32), np.zeros((trees, width), np.int32)
    for tree in range(trees):
        for place in range(accepted[tree] + 1):
            row = words[logit_rows + tree * nodes + place]
            rows[tree, place], tokens[tree, place] = row, words[row]
    return tokens, rows, accepted
