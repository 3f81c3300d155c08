"""Packs the usual step, trees to verify and nothing else, from columns over all trees: without an object a session.

What `outrider.engine.step_staging` packs from a batch and its choices is written here straight into the step's arrays,
with as few numpy calls as it takes: a step's host time is one of its costs.

Shapes: T rows of all trees (root and nodes, tree after tree), bs trees.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from outrider.engine.buckets import Bucket
from outrider.engine.kv_slots import SlotTable
from outrider.engine.step_buffers import StagedStep, StepBuffer, StepLayout
from outrider.engine.step_staging import pack_changes
from outrider.tree import climb, link

_CHOICES = ("seeds", "temperature", "top_p", "min_p", "top_k", "choice_index")
RECORD = np.dtype({
    "names": list(_CHOICES),
    "formats": ["<i8", "<f4", "<f4", "<f4", "<i4", "<i4"],
    "offsets": [0, 8, 12, 16, 20, 24],
    "itemsize": 32,
})  # fmt: skip
"""`SamplingSpec.record`."""


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


def stage_trees(
    trees: TreeColumns, *, slots: SlotTable, choose: Callable[[Bucket], Bucket], buffer: StepBuffer
) -> StagedStep:
    """The step, packed into `buffer`; arguments as those of `stage_step`."""
    total, bs, most = len(trees.tokens), len(trees.rows), max(trees.counts)
    of_tree = np.array([trees.rows, trees.roots, trees.lasts, trees.counts], dtype=np.int32)
    rows, roots, _, counts = of_tree
    key_len = roots + counts
    bucket = choose(Bucket(
        tokens=total, sessions=bs, keys=int(key_len.max()), query_len=most, logit_rows=total, nodes=most,
        words=(most + 63) // 64,
    ))  # fmt: skip
    layout = StepLayout.of(bucket)
    data, arrays = buffer.step(layout)
    arrays["rows"][:bs] = rows
    arrays["tree_start"][:bs] = roots
    arrays["key_len"][:bs] = key_len
    arrays["query_start"][bs + 1 :] = total
    arrays["token_ids"][:total] = trees.tokens
    arrays["logit_rows"][:total] = np.arange(total)
    if total == bs:
        _pack_roots(trees, arrays, of_tree, slots)
    else:
        _pack_trees(trees, arrays, of_tree, slots)
    leave_decided(trees.decided, arrays["tree_rows"])
    more = pack_changes(rows, slots, arrays)
    return StagedStep(bucket=bucket, data=data, more_updates=more, logit_rows=total, trees=bs, buffer=buffer)


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
