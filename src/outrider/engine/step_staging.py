"""Packs a forward into the bytes of a step: all that the device needs, in one copy.

The device keeps a copy of the slot table; a step brings along what changed in its sessions' rows since their last one.

In deterministic mode tree rows are unrolled: each is a session of its own, whose keys are its prefix and its path, in
their order, as if the path had been decoded one token at a time. In a tree a node's ancestors stand between nodes of
other branches, and sums over other places have other bits. Prefill chains stay together: their keys stand in order.

Shapes: as in `outrider.engine.step_buffers`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from outrider.engine.batch import ForwardBatch, Int32Array, TreeChoices
from outrider.engine.buckets import Bucket
from outrider.engine.kv_slots import SlotTable
from outrider.engine.step_buffers import StagedStep, StepBuffer, StepLayout

_NOTHING_MORE = np.empty((3, 0), dtype=np.int32)


def need_of(batch: ForwardBatch, choices: TreeChoices | None) -> Bucket:
    """The exact size of a step."""
    return Bucket(
        tokens=batch.num_rows,
        sessions=len(batch.rows),
        keys=int(batch.key_len.max()),
        query_len=int(np.diff(batch.query_start).max()),
        logit_rows=len(batch.logit_rows),
        nodes=0 if choices is None else choices.candidates.shape[1],
        words=batch.tree_mask.shape[1],
    )


def stage_step(
    batch: ForwardBatch,
    choices: TreeChoices | None,
    *,
    slots: SlotTable,
    choose: Callable[[Bucket], Bucket],
    buffer: StepBuffer,
    unrolled: bool = False,
) -> StagedStep:
    """The step, packed into `buffer`; its rows' slots are reserved in `slots`.

    Args:
        batch: the forward.
        choices: how its logits choose; None where the logits themselves are wanted.
        slots: the slot table; what changed in it counts as sent.
        choose: the bucket that holds a step of a given size.
        buffer: free to be written.
        unrolled: whether tree rows are sessions of their own.
    """
    table = slots.table
    session = np.repeat(np.arange(len(batch.rows)), np.diff(batch.query_start))
    write_slots = table[batch.rows[session], batch.write_index]
    assert (write_slots >= 0).all(), "a row writes to a slot that was not reserved"
    batch_rows = batch.rows
    paths = np.empty((3, 0), dtype=np.int32)
    if unrolled:
        batch, paths = unroll(batch, table, session)
    bucket = choose(need_of(batch, choices))
    layout = StepLayout.of(bucket)
    data, arrays = buffer.step(layout)
    rows, sessions, logit_rows = batch.num_rows, len(batch.rows), len(batch.logit_rows)
    for name in ("token_ids", "positions", "prefix_len"):
        arrays[name][:rows] = getattr(batch, name)
    arrays["write_slots"][:rows] = write_slots
    arrays["tree_mask"][:rows, : batch.tree_mask.shape[1]] = batch.tree_mask
    for name in ("rows", "tree_start", "key_len"):
        arrays[name][:sessions] = getattr(batch, name)
    arrays["query_start"][:sessions] = batch.query_start[:-1]
    arrays["query_start"][sessions:] = rows
    arrays["logit_rows"][:logit_rows] = batch.logit_rows
    more = pack_changes(batch_rows, slots, arrays)
    for place, name in enumerate(("path_rows", "path_columns", "path_slots") if unrolled else ()):
        arrays[name][: paths.shape[1]] = paths[place]
    if choices is not None:
        _pack_choices(choices, arrays, logit_rows)
    return StagedStep(
        bucket=bucket,
        data=data,
        more_updates=more,
        logit_rows=logit_rows,
        trees=0 if choices is None else len(choices.candidates),
        buffer=buffer,
    )


def _pack_choices(choices: TreeChoices, arrays: dict[str, np.ndarray], logit_rows: int) -> None:
    for name in ("seeds", "temperature", "top_k", "top_p", "min_p", "choice_index"):
        arrays[name][:logit_rows] = getattr(choices, name)
    arrays["choice_positions"][:logit_rows] = choices.positions
    trees, nodes = choices.candidates.shape
    for name in ("candidates", "tree_rows", "first_child", "next_sibling"):
        arrays[name][:trees, :nodes] = getattr(choices, name)


def pack_changes(rows: Int32Array, slots: SlotTable, arrays: dict[str, np.ndarray]) -> npt.NDArray[np.int32]:
    """Packs what may have changed in the sessions' rows since the last call, and returns what finds no place.

    Args:
        rows: [S] of the slot table.
        slots: the table.
        arrays: of the step.

    Returns:
        [3, n] row, column and slot.
    """
    begins, ends = slots.take_changes(rows.tolist())
    if len(begins) == 1:
        columns = np.arange(begins[0], ends[0])
        table_rows = rows.repeat(len(columns))
    else:
        firsts = np.array(begins)
        counts = np.array(ends) - firsts
        of_entry = np.array([rows, firsts - counts.cumsum() + counts]).repeat(counts, axis=1)
        table_rows, columns = of_entry[0], of_entry[1] + np.arange(of_entry.shape[1])
    taken = slots.table[table_rows, columns]
    room = len(arrays["update_rows"])
    for name, values in (("update_rows", table_rows), ("update_columns", columns), ("update_slots", taken)):
        arrays[name][: len(values)] = values[:room]
    if len(columns) <= room:
        return _NOTHING_MORE
    return np.stack([table_rows, columns, taken])[:, room:].astype(np.int32)


def unroll(
    batch: ForwardBatch, table: npt.NDArray[np.int32], session: npt.NDArray[np.intp]
) -> tuple[ForwardBatch, npt.NDArray[np.int32]]:
    """The batch with every tree row as a session of its own, and the slots of these rows' paths.

    Args:
        batch: as it was built.
        table: [all rows, len] the slot table.
        session: [T] of each row.

    Returns:
        The batch, and [3, P] new session, key index and slot: entries that differ from the session's row of the table.
    """
    is_tree = np.asarray(batch.tree_mask.any(axis=1))
    begins = np.ones(batch.num_rows, dtype=np.bool_)
    begins[1:] = is_tree[1:] | is_tree[:-1] | (session[1:] != session[:-1])
    starts = np.flatnonzero(begins)
    lasts = np.append(starts[1:], batch.num_rows) - 1
    bits = np.unpackbits(np.ascontiguousarray(batch.tree_mask).view(np.uint8), axis=1, bitorder="little")
    lengths = bits.sum(axis=1, dtype=np.int32)
    prefix_len = (batch.prefix_len + lengths).astype(np.int32)
    row, bit = np.nonzero(bits)
    first_key = batch.tree_start[session[row]]
    # The place within the path: nonzero goes through the bits of a row in ascending order.
    ranks = np.arange(len(row)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    new_session = np.cumsum(begins) - 1
    slots = table[batch.rows[session[row]], first_key + bit]
    paths = np.stack([new_session[row], first_key + ranks, slots]).astype(np.int32)
    unrolled = replace(
        batch,
        rows=batch.rows[session[starts]],
        query_start=np.append(starts, batch.num_rows).astype(np.int32),
        tree_start=prefix_len[lasts],
        prefix_len=prefix_len,
        tree_mask=np.zeros((batch.num_rows, 1), dtype=np.int64),
        key_len=prefix_len[lasts],
    )
    return unrolled, paths


@dataclass(kw_only=True, eq=False, slots=True)
class StepAnswer:
    """What comes back of a step whose choices were walked. Not frozen, as `StagedStep` is not.

    Attributes:
        tokens: [bs, m] the chosen token at each row of a path, root first; m is the longest path's length.
        rows: [bs, m] which of the R rows these are.
        accepted: [bs] how many nodes each path has beside its root; entries past that mean nothing.
    """

    tokens: Int32Array
    rows: Int32Array
    accepted: Int32Array

    @classmethod
    def of(cls, answer: Int32Array, staged: StagedStep) -> "StepAnswer":
        """From the int32 words that the device sent: predictions [R], paths [S, N], accepted [S]."""
        bucket = staged.bucket
        predicts, rest = answer[: bucket.logit_rows], answer[bucket.logit_rows :]
        paths = rest[: bucket.sessions * bucket.nodes].reshape(bucket.sessions, bucket.nodes)[: staged.trees]
        accepted = rest[bucket.sessions * bucket.nodes :][: staged.trees].copy()
        rows = paths[:, : int(accepted.max(initial=0)) + 1].copy()
        inside = np.arange(rows.shape[1]) <= accepted[:, None]
        return cls(tokens=predicts[np.where(inside, rows, 0)], rows=rows, accepted=accepted)
