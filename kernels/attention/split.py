"""Split of a step's keys into those that all rows of a session see, and those that some rows see.

    shared   seen by every row of the session    nearly all of a long context
    masked   seen by some of its rows            the tree, a prefill chunk's own keys, the edge of a sliding window
    neither                                      left out

An attention kernel that takes no tree masks, or slowly, runs over the shared keys without one and over the masked keys
with a small dense one; the two results merge by their masses.

Shapes: T query rows, S sessions, N keys of all sessions, C cells (row, key) of a mask.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outrider.kernels.attention.batch import TreeAttentionBatch

__all__ = ["SplitKeys", "split_keys"]


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class SplitKeys:
    """The keys of one step, apart.

    Attributes:
        rows: rows that belong to sessions; they come first.
        query_start: [S + 1] int32, of these rows.
        shared_start: [S + 1] int32, shared_slots: [N1] int32, the slots of the keys that all rows of a session see.
        masked_start: [S + 1] int32, masked_slots: [N2] int32, the slots of those that only some may see.
        mask: [C] bool, session after session [rows, masked keys]: whether the row sees the key.
    """

    rows: int
    query_start: torch.Tensor
    shared_start: torch.Tensor
    shared_slots: torch.Tensor
    masked_start: torch.Tensor
    masked_slots: torch.Tensor
    mask: torch.Tensor


def split_keys(batch: TreeAttentionBatch, *, num_slots: int, sliding_window: int) -> SplitKeys:
    """Put each session's keys where they belong; on the device of the batch, waiting for the host."""
    device = batch.tree_mask.device
    query_start = batch.query_start.clamp(0, batch.prefix_len.shape[0])
    rows = int(query_start[-1])
    row = torch.arange(rows, device=device)
    session = torch.searchsorted(query_start[1:], row, right=True)
    all_rows, some_rows = _classify(batch, session, query_start.diff() > 0, num_slots, sliding_window)
    index = torch.arange(all_rows.shape[1], device=device).expand_as(all_rows)
    masked_start = _starts(some_rows.sum(dim=1))
    # One cell for each row and masked key of its session, row after row.
    keys_of_row = masked_start.diff()[session].long()
    cell_row = row.repeat_interleave(keys_of_row)
    first_cell = keys_of_row.cumsum(0) - keys_of_row
    cell_key = torch.arange(cell_row.shape[0], device=device) - (first_cell - masked_start[session])[cell_row]
    mask = _sees(
        batch,
        cell_row,
        session[cell_row],
        index[some_rows][cell_key],
        num_slots=num_slots,
        sliding_window=sliding_window,
    )
    table = batch.slot_table[:, : index.shape[1]]
    return SplitKeys(
        rows=rows,
        query_start=query_start,
        shared_start=_starts(all_rows.sum(dim=1)),
        shared_slots=table[all_rows],
        masked_start=masked_start,
        masked_slots=table[some_rows],
        mask=mask,
    )


def _classify(
    batch: TreeAttentionBatch, session: torch.Tensor, has_rows: torch.Tensor, num_slots: int, sliding_window: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys that certainly all rows of a session see and keys that perhaps some see, both [S, max_key_len] bool."""
    table = batch.slot_table[:, : batch.max_key_len]
    index = torch.arange(table.shape[1], device=table.device)
    possible = (table >= 0) & (table < num_slots) & (index < batch.key_len[:, None]) & has_rows[:, None]
    all_rows = possible & (index < _reduce(batch.prefix_len, session, has_rows, "amin")[:, None])
    if sliding_window > 0:
        assert batch.positions is not None and batch.slot_positions is not None
        of_key = batch.slot_positions[table.clamp(0, num_slots - 1).long()]
        all_rows &= _reduce(batch.positions, session, has_rows, "amax")[:, None] - of_key < sliding_window
        possible &= _reduce(batch.positions, session, has_rows, "amin")[:, None] - of_key < sliding_window
    return all_rows, possible & ~all_rows


def _reduce(of_row: torch.Tensor, session: torch.Tensor, has_rows: torch.Tensor, how: str) -> torch.Tensor:
    """The least or greatest value of each session's rows, [S]; 0 for a session without rows."""
    start = torch.zeros(has_rows.shape[0], dtype=of_row.dtype, device=of_row.device)
    return start.scatter_reduce(0, session, of_row[: session.shape[0]], how, include_self=False)


def _starts(counts: torch.Tensor) -> torch.Tensor:
    """[S] counts -> [S + 1] int32 places where each begins."""
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()


def _sees(
    batch: TreeAttentionBatch,
    row: torch.Tensor,
    session: torch.Tensor,
    index: torch.Tensor,
    *,
    num_slots: int,
    sliding_window: int,
) -> torch.Tensor:
    """Return whether each row sees the key `index` of its session: three [C] int64 tensors give [C] bool."""
    slot = batch.slot_table[session, index]
    in_cache = (slot >= 0) & (slot < num_slots) & (index < batch.key_len[session])
    seen = in_cache & ((index < batch.prefix_len[row]) | _tree_bit(batch, row, index - batch.tree_start[session]))
    if sliding_window > 0:
        assert batch.positions is not None and batch.slot_positions is not None
        behind = batch.positions[row] - batch.slot_positions[slot.clamp(0, num_slots - 1).long()]
        seen = seen & (behind < sliding_window)
    return seen


def _tree_bit(batch: TreeAttentionBatch, row: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """Bit `offset` of a row's mask words; none below 0 or past the last word."""
    bits = 64 * batch.tree_mask.shape[1]
    if bits == 0:
        return torch.zeros_like(offset, dtype=torch.bool)
    word = batch.tree_mask[row, offset.clamp(0, bits - 1) >> 6]
    return (offset >= 0) & (offset < bits) & ((word >> (offset & 63)) & 1 != 0)
