"""Packs a one-graph round: what the host knows of its sessions, once a session; the nodes are on the device.

Shapes: S sessions, n rows of each, T = S n; as in `outrider.engine.one_graph_buckets`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from outrider.engine.batch import Int32Array
from outrider.engine.kv_slots import SlotTable
from outrider.engine.one_graph_buckets import RoundBucket, RoundLayout
from outrider.engine.one_graph_shape import RoundShape
from outrider.engine.step_buffers import StagedStep, StepBuffer
from outrider.engine.step_staging import StepAnswer, pack_changes
from outrider.engine.step_trees import RECORD


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class RoundColumns:
    """The sessions of a round, whose rows have their slots.

    Attributes:
        rows: [S] of the slot table.
        roots: [S] key index of each root, after which its nodes and its head's rows stand.
        lasts: [S] highest position that a node may have.
        tokens: [S] the roots'.
        is_known: [S] whether the device holds candidates that follow this root.
        records: `SamplingSpec.record` of each session, one after the other.
        lists: what changes the logits, by the names of `RoundLayout`'s arrays, shorter than these; empty: nothing.
    """

    rows: Sequence[int]
    roots: Sequence[int]
    lasts: Sequence[int]
    tokens: Sequence[int]
    is_known: Sequence[bool]
    records: bytes
    lists: Mapping[str, np.ndarray] = field(default_factory=dict)


def stage_round(
    columns: RoundColumns,
    *,
    shape: RoundShape,
    slots: SlotTable,
    bucket: RoundBucket,
    buffer: StepBuffer,
) -> StagedStep:
    """The round, packed into `buffer`; what changed in the slot table counts as sent."""
    layout = RoundLayout.of_round(bucket)
    data, arrays = buffer.step(layout)
    sessions, per = len(columns.rows), shape.rows
    total = sessions * per
    rows, roots, lasts, tokens, known = (
        np.array(column, dtype=np.int32)
        for column in (columns.rows, columns.roots, columns.lasts, columns.tokens, columns.is_known)
    )
    for name, values in (("rows", rows), ("tree_start", roots), ("key_len", roots + shape.slots)):
        arrays[name][:sessions] = values
    arrays["query_start"][:sessions] = np.arange(0, total, per)
    arrays["query_start"][sessions:] = total
    keys = roots[:, None] + np.arange(shape.slots, dtype=np.int32)
    own = slots.table[rows[:, None], keys]
    assert own.min() >= 0, "a row writes to a slot that was not reserved"
    positions = roots[:, None] + shape.depths
    arrays["token_ids"][:total:per] = tokens
    arrays["write_slots"][:total] = own[:, :per].reshape(-1)
    arrays["positions"][:total] = np.minimum(positions, lasts[:, None]).reshape(-1)
    arrays["prefix_len"][:total] = np.repeat(roots, per)
    arrays["tree_mask"][:total, 0] = np.tile(shape.masks, sessions)
    arrays["logit_rows"][:] = np.arange(len(arrays["logit_rows"]))
    arrays["choice_positions"][:total] = (positions + 1).reshape(-1)
    record = np.repeat(np.frombuffer(columns.records, dtype=RECORD), per)
    for name in RECORD.names or ():
        arrays[name][:total] = record[name]
    arrays["tree_rows"][:sessions] = np.arange(total).reshape(sessions, per)
    arrays["first_child"][:sessions] = shape.first_child
    arrays["next_sibling"][:sessions] = shape.next_sibling
    arrays["is_known"][:sessions] = known
    arrays["last_positions"][:sessions] = lasts
    arrays["draft_start"][:sessions] = np.arange(sessions)
    arrays["draft_start"][sessions:] = sessions
    arrays["draft_slots"][:, :sessions] = own[:, per:].T
    for name, values in columns.lists.items():
        arrays[name][: len(values)] = values
        if name.endswith("_start"):
            # What belongs to nobody has an empty list.
            arrays[name][len(values) :] = values[-1]
    more = pack_changes(rows, slots, arrays)
    return StagedStep(bucket=bucket, data=data, more_updates=more, logit_rows=total, trees=sessions, buffer=buffer)


@dataclass(frozen=True, kw_only=True, eq=False)
class RoundAnswer:
    """What comes back of a round.

    Attributes:
        step: tokens and paths, as of any step whose choices were walked.
        token_logprobs: [T] float32, of the token chosen at each row; empty where nobody asked.
        top_token_ids: [T, K] int32, the most likely tokens of each row, best first.
        top_logprobs: [T, K] float32.
    """

    step: StepAnswer
    token_logprobs: npt.NDArray[np.float32]
    top_token_ids: Int32Array
    top_logprobs: npt.NDArray[np.float32]

    @classmethod
    def of(cls, answer: Int32Array, staged: StagedStep) -> "RoundAnswer":
        """From the int32 words that the device sent (`one_graph_program.answer_parts`)."""
        bucket = staged.bucket
        assert isinstance(bucket, RoundBucket)
        walked = bucket.logit_rows + bucket.sessions * (bucket.nodes + 1)
        columns = max(bucket.alternatives, 0)
        told = answer[walked:].copy()
        ends = np.cumsum([bucket.tokens if bucket.alternatives >= 0 else 0, *2 * [bucket.tokens * columns]])
        chosen, ids, best, _ = np.split(told, ends)
        return cls(
            step=StepAnswer.of(answer, staged),
            token_logprobs=chosen.view(np.float32),
            top_token_ids=ids.reshape(-1, columns) if columns else ids.reshape(len(chosen), 0),
            top_logprobs=best.view(np.float32).reshape(-1, columns)
            if columns
            else best.view(np.float32).reshape(len(chosen), 0),
        )
