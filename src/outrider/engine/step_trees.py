"""Packs the usual step, trees to verify and nothing else, from columns over all trees: without an object a session.

What `outrider.engine.step_staging` packs from a batch and its choices is written here straight into the step's arrays,
by one loop (`outrider.engine.tree_kernels`), or with as few numpy calls as it takes: a step's host time is one of its
costs.

Shapes: T rows of all trees (root and nodes, tree after tree), bs trees.
"""

import functools
import operator
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from outrider.compiled import IS_COMPILED
from outrider.engine import slot_kernels, tree_kernels
from outrider.engine.batch import Int32Array
from outrider.engine.buckets import Bucket
from outrider.engine.kv_slots import SlotTable
from outrider.engine.step_buffers import Bytes, StagedStep, StepBuffer, StepLayout
from outrider.engine.step_staging import StepAnswer, pack_changes
from outrider.tree import climb, link

_CHOICES = ("seeds", "temperature", "top_p", "min_p", "top_k", "choice_index")
RECORD = np.dtype({
    "names": list(_CHOICES),
    "formats": ["<i8", "<f4", "<f4", "<f4", "<i4", "<i4"],
    "offsets": [0, 8, 12, 16, 20, 24],
    "itemsize": 32,
})  # fmt: skip
"""`SamplingSpec.record`."""
_NOTHING_MORE = np.empty((3, 0), dtype=np.int32)


@dataclass(kw_only=True, eq=False, slots=True)
class TreeColumns:
    """Trees of several sessions, whose rows have their slots.

    Attributes:
        rows: [bs] of the slot table.
        roots: [bs] key index of each root, after which its nodes stand.
        lasts: [bs] highest position that a node may have.
        counts: [bs] rows of each tree.
        tokens: [T]
        parents: [T] node numbers within the tree, 0 for roots.
        records: `SamplingSpec.record` of each session, one after the other.
        decided: (tree, node number) of trees whose path is known before: see `leave_decided`.
    """

    rows: Sequence[int]
    roots: Sequence[int]
    lasts: Sequence[int]
    counts: Sequence[int]
    tokens: Sequence[int] | npt.NDArray[np.int64]
    parents: Sequence[int] | npt.NDArray[np.int64]
    records: bytes
    decided: Sequence[tuple[int, int]] = ()


def need_of_trees(trees: TreeColumns) -> Bucket:
    """The exact size of a step."""
    total, most = len(trees.tokens), max(trees.counts)
    return Bucket(
        tokens=total, sessions=len(trees.rows), keys=max(map(operator.add, trees.roots, trees.counts)), query_len=most,
        logit_rows=total, nodes=most, words=(most + 63) // 64,
    )  # fmt: skip


def stage_trees(trees: TreeColumns, *, slots: SlotTable, bucket: Bucket, buffer: StepBuffer) -> StagedStep:
    """The step, packed into `buffer`, as by `stage_step`.

    Args:
        trees: of the step.
        slots: the slot table; what changed in it counts as sent.
        bucket: that holds it.
        buffer: free to be written.
    """
    layout = StepLayout.of(bucket)
    data, more = (_pack_compiled if IS_COMPILED else pack_tree_columns)(trees, layout, slots, buffer)
    total = len(trees.tokens)
    return StagedStep(
        bucket=bucket, data=data, more_updates=more, logit_rows=total, trees=len(trees.rows), buffer=buffer
    )


def _pack_compiled(
    trees: TreeColumns, layout: StepLayout, slots: SlotTable, buffer: StepBuffer
) -> tuple[Bytes, npt.NDArray[np.int32]]:
    """`pack_tree_columns` as one loop."""
    begins, ends = slots.take_changes(trees.rows)
    views, (places, template) = buffer.views(layout.nbytes), _places(layout)
    columns = [*trees.rows, *trees.roots, *trees.lasts, *trees.counts, *begins, *ends]
    changed = tree_kernels.pack_trees(
        (layout.bucket.words, layout.bucket.nodes),
        np.frombuffer(array("q", columns), dtype=np.int64).reshape(6, -1),
        np.asarray(trees.tokens),
        np.asarray(trees.parents),
        np.frombuffer(trees.records, dtype=np.int32),
        slots.table,
        places,
        template,
        views.wide,
        views.words,
    )
    assert changed >= 0, "a row writes to a slot that was not reserved"
    for tree, node in trees.decided:
        views.words[layout.begins["tree_rows"] // 4 + tree * layout.bucket.nodes] += node
    if changed <= layout.updates:
        return views.data, _NOTHING_MORE
    # Rare: a prompt that came out of the cache.
    entries = [
        (row, index)
        for row, begin, end in zip(trees.rows, begins, ends, strict=True)
        for index in range(begin, end)
    ]  # fmt: skip
    rows, columns = np.array(entries[layout.updates :]).T
    return views.data, np.stack([rows, columns, slots.table[rows, columns]]).astype(np.int32)


@functools.lru_cache(maxsize=512)
def _places(layout: StepLayout) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Where the arrays of a layout lie, and a step of nothing, as the loop takes them."""
    places = [layout.begins[name] for name in tree_kernels.ARRAYS]
    return np.array([*places, layout.updates, layout.bucket.sessions]), layout.template.view(np.int64)


def pack_tree_columns(
    trees: TreeColumns, layout: StepLayout, slots: SlotTable, buffer: StepBuffer
) -> tuple[Bytes, npt.NDArray[np.int32]]:
    """A step's bytes, and the changed entries of the slot table that find no place there."""
    total, bs = len(trees.tokens), len(trees.rows)
    of_tree = np.array([trees.rows, trees.roots, trees.lasts, trees.counts], dtype=np.int32)
    rows, roots, _, counts = of_tree
    data, arrays = buffer.step(layout)
    arrays["rows"][:bs] = rows
    arrays["tree_start"][:bs] = roots
    arrays["key_len"][:bs] = roots + counts
    arrays["query_start"][bs + 1 :] = total
    arrays["token_ids"][:total] = trees.tokens
    arrays["logit_rows"][:total] = np.arange(total)
    if total == bs:
        _pack_roots(trees, arrays, of_tree, slots)
    else:
        _pack_trees(trees, arrays, of_tree, slots)
    leave_decided(trees.decided, arrays["tree_rows"])
    return data, pack_changes(rows, slots, arrays)


def read_answer(words: Int32Array, staged: StagedStep) -> StepAnswer:
    """`StepAnswer.of`, in less time."""
    if not IS_COMPILED:
        return StepAnswer.of(words, staged)
    bucket = staged.bucket
    found = tree_kernels.read_walks(words, bucket.logit_rows, bucket.sessions, bucket.nodes, staged.trees)
    return StepAnswer(tokens=found[0], rows=found[1], accepted=found[2])


def warm_up() -> None:
    """Compiles the loops, or loads what was compiled, before anybody waits for them."""
    if not IS_COMPILED:
        return
    nothing = np.zeros(0, np.int64)
    places, words = np.zeros(len(tree_kernels.ARRAYS) + 2, np.int64), np.zeros((1, 1), np.int32)
    tree_kernels.are_trees(nothing, nothing, nothing, nothing, 1)
    tree_kernels.pack_trees(
        (1, 1), np.zeros((6, 0), np.int64), nothing, nothing, np.frombuffer(b"", dtype=np.int32), words, places,
        nothing, nothing, words[0],
    )  # fmt: skip
    tree_kernels.read_walks(words[0], 0, 0, 0, 0)
    slot_kernels.warm_up()


def _pack_roots(trees: TreeColumns, arrays: dict[str, np.ndarray], of_tree: np.ndarray, slots: SlotTable) -> None:
    """Trees without nodes: rows that neither see nor follow one another."""
    rows, roots, lasts, _ = of_tree
    bs = len(rows)
    arrays["query_start"][: bs + 1] = np.arange(bs + 1)
    write_slots = slots.table[rows, roots]
    assert write_slots.min() >= 0, "a row writes to a slot that was not reserved"
    arrays["write_slots"][:bs] = write_slots
    arrays["tree_mask"][:bs, 0] = 1
    np.minimum(roots, lasts, out=arrays["positions"][:bs])
    arrays["prefix_len"][:bs] = roots
    np.add(roots, 1, out=arrays["choice_positions"][:bs])
    arrays["tree_rows"][:bs, 0] = np.arange(bs)
    columns = np.frombuffer(trees.records, dtype=RECORD)
    for name in _CHOICES:
        arrays[name][:bs] = columns[name]


def _pack_trees(trees: TreeColumns, arrays: dict[str, np.ndarray], of_tree: np.ndarray, slots: SlotTable) -> None:
    counts = of_tree[3]
    ends = counts.cumsum()
    bs, total, most = len(counts), len(trees.tokens), arrays["tree_rows"].shape[1]
    arrays["query_start"][1 : bs + 1] = ends
    # Of every row: its tree's row of the table, root, last position, first row, and place in [bs, n].
    of_row = np.concatenate([of_tree[:3], (ends - counts)[None], np.arange(0, bs * most, most)[None]]).repeat(
        counts, axis=1
    )
    number = np.arange(total) - of_row[3]
    keys = of_row[1] + number
    above = of_row[3] + trees.parents
    depths, masks = climb(above, number, words=(int(counts.max()) + 63) // 64)
    write_slots = slots.table[of_row[0], keys]
    assert write_slots.min() >= 0, "a row writes to a slot that was not reserved"
    positions = of_row[1] + depths
    arrays["write_slots"][:total] = write_slots
    arrays["tree_mask"][:total, : masks.shape[1]] = masks
    np.minimum(positions, of_row[2], out=arrays["positions"][:total], casting="unsafe")
    arrays["prefix_len"][:total] = of_row[1]
    arrays["choice_positions"][:total] = positions + 1
    place = of_row[4] + number
    first_child, next_sibling = link(above, number)
    arrays["tree_rows"].reshape(-1)[place] = np.arange(total)
    arrays["candidates"].reshape(-1)[place] = arrays["token_ids"][:total]
    arrays["candidates"][:bs, 0] = -1
    arrays["first_child"].reshape(-1)[place] = first_child
    arrays["next_sibling"].reshape(-1)[place] = next_sibling
    columns = np.frombuffer(trees.records, dtype=RECORD).repeat(counts)
    for name in _CHOICES:
        arrays[name][:total] = columns[name]


def leave_decided(ends: Sequence[tuple[int, int]], tree_rows: np.ndarray) -> None:
    """Lets the walks of some trees begin with the choice at a given node in place of the root's.

    A walk's first token is then that choice, and the rest of it means nothing; it takes as long as any other.

    Args:
        ends: (tree, node number).
        tree_rows: [bs, n], changed; a tree's rows follow one another.
    """
    for tree, node in ends:
        tree_rows[tree, 0] += node
