"""Arrays of one step of tree attention, and what is derived from them once a step.

The arrays are the same for every layer, so everything that depends on them alone (gathered slot lists and masks on
the CPU) is computed at the first layer and kept on the batch.

Shapes: S sessions, T query rows of all sessions, W mask words, L keys of one session.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from outrider.kernels.argument_checks import check_tensors


@dataclass(frozen=True, kw_only=True, eq=False)
class TreeAttentionBatch:
    """Keys that each query row of a step may attend to.

    Session s owns the query rows `query_start[s]` to `query_start[s + 1]` and the keys j < `key_len[s]`; key j lives
    in slot `slot_table[s, j]` of the caches. Row r of session s attends key j when `j < prefix_len[r]`, or when
    `j >= tree_start[s]` and bit `j - tree_start[s]` of `tree_mask[r]` (little-endian over the words) is set. A prefill
    row has `prefix_len` = its own index + 1 and an empty mask; a tree row has `prefix_len = tree_start[s]` and the
    bits of its ancestors and itself. Keys whose slot lies outside the caches are never attended.

    Attributes:
        slot_table: [S, max_len] int32.
        query_start: [S + 1] int32, ascending from 0; rows from `query_start[S]` on belong to no session.
        tree_start: [S] int32.
        prefix_len: [T] int32.
        key_len: [S] int32, at most max_len.
        tree_mask: [T, W] int64.
        max_query_len: an upper bound of the rows of one session, known to the host.
        max_key_len: an upper bound of `key_len`, known to the host.
        positions: [T] int32, the rows' positions; needed by sliding windows only.
        slot_positions: [num_slots] int32, the position of the token in each slot; needed by sliding windows only.
        split_keys: CUDA: keys per split, fixed for results that do not depend on the batch's shape; None lets the
            kernel choose by the size of the batch.
        paths: [T, 64 W] int32, CUDA: the slots of each row's keys in the tree, as `gather_paths` writes them. With them
            a row reads its keys as if these alone stood behind its prefix: sums do not depend on the other branches.

    Raises:
        ValueError: a shape or dtype that does not fit, naming the argument.
    """

    slot_table: torch.Tensor
    query_start: torch.Tensor
    tree_start: torch.Tensor
    prefix_len: torch.Tensor
    key_len: torch.Tensor
    tree_mask: torch.Tensor
    max_query_len: int
    max_key_len: int
    positions: torch.Tensor | None = None
    slot_positions: torch.Tensor | None = None
    split_keys: int | None = None
    paths: torch.Tensor | None = None
    _cpu_plans: dict[tuple[int, int], tuple[SessionPlan, ...]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        int32 = (torch.int32,)
        check_tensors(
            key_len=(self.key_len, ("S",), int32),
            prefix_len=(self.prefix_len, ("T",), int32),
            slot_table=(self.slot_table, ("S", "max_len"), int32),
            query_start=(self.query_start, (self.key_len.shape[0] + 1,), int32),
            tree_start=(self.tree_start, ("S",), int32),
            tree_mask=(self.tree_mask, ("T", "words"), (torch.int64,)),
            positions=(self.positions, ("T",), int32),
            slot_positions=(self.slot_positions, ("num_slots",), int32),
            paths=(self.paths, ("T", 64 * self.tree_mask.shape[-1]), int32),
        )
        if self.max_key_len > self.slot_table.shape[1]:
            raise ValueError(f"max_key_len: {self.max_key_len} given, at most {self.slot_table.shape[1]} needed")
        if self.split_keys is not None and self.split_keys < 1:
            raise ValueError(f"split_keys: {self.split_keys} given, at least 1 needed")

    def cpu_plan(self, num_slots: int, sliding_window: int) -> tuple[SessionPlan, ...]:
        """The sessions that have rows and keys, for caches of `num_slots` slots and this window.

        Built at its first use and kept: the arrays must not change after that.
        """
        key = (num_slots, sliding_window)
        plan = self._cpu_plans.get(key)
        if plan is None:
            plan = self._cpu_plans[key] = _plan_cpu(self, num_slots, sliding_window)
        return plan


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionPlan:
    """One session's part of a CPU plan: its rows, where its keys lie, and what its rows may not see.

    Attributes:
        row_begin, row_end: the rows of the session.
        slots: [L] int32 slots of the keys, or None where they are consecutive from `slot_begin`.
        slot_begin, key_count: the first slot and L.
        mask: [rows, 1, L - mask_begin] float32, 0 where visible and -inf elsewhere; None where all is visible.
        mask_begin: keys before it are visible to every row.
        blank: [rows, 1, 1] bool, rows that see no key; None where there are none.
    """

    row_begin: int
    row_end: int
    slots: torch.Tensor | None
    slot_begin: int
    key_count: int
    mask: torch.Tensor | None
    mask_begin: int
    blank: torch.Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _HostArrays:
    """The batch's tensors as numpy arrays over the same memory, with the masks unpacked to one bool per key."""

    slot_table: np.ndarray
    prefix_len: np.ndarray
    tree_start: list[int]
    tree_bits: np.ndarray
    positions: np.ndarray | None
    slot_positions: np.ndarray | None
    num_slots: int
    sliding_window: int


def _plan_cpu(batch: TreeAttentionBatch, num_slots: int, sliding_window: int) -> tuple[SessionPlan, ...]:
    words = np.ascontiguousarray(batch.tree_mask.cpu().numpy())
    windowed = sliding_window > 0
    assert not windowed or (batch.positions is not None and batch.slot_positions is not None)
    arrays = _HostArrays(
        slot_table=batch.slot_table.cpu().numpy(),
        prefix_len=batch.prefix_len.cpu().numpy(),
        tree_start=batch.tree_start.tolist(),
        tree_bits=np.unpackbits(words.view(np.uint8), axis=1, bitorder="little").view(np.bool_),
        positions=None if batch.positions is None else batch.positions.cpu().numpy(),
        slot_positions=None if batch.slot_positions is None else batch.slot_positions.cpu().numpy(),
        num_slots=num_slots,
        sliding_window=sliding_window,
    )
    rows = arrays.prefix_len.shape[0]
    starts = [min(max(start, 0), rows) for start in batch.query_start.tolist()]
    sessions = []
    for session, key_len in enumerate(batch.key_len.tolist()):
        begin, end = starts[session], starts[session + 1]
        keys = min(key_len, batch.max_key_len)
        if end > begin and keys > 0 and num_slots > 0:
            sessions.append(_plan_session(arrays, session, slice(begin, end), keys))
    return tuple(sessions)


def _plan_session(arrays: _HostArrays, session: int, rows: slice, keys: int) -> SessionPlan:
    slots = arrays.slot_table[session, :keys]
    lowest, highest = int(slots.min()), int(slots.max())
    inside = lowest >= 0 and highest < arrays.num_slots
    # What every row sees needs no mask; with a window or slots out of range any key may be hidden.
    mask_begin = 0
    if inside and arrays.sliding_window <= 0:
        mask_begin = min(max(int(arrays.prefix_len[rows].min()), 0), keys)
    visible = _visible(arrays, session, rows, mask_begin, keys)
    if not inside:
        in_range = (slots >= 0) & (slots < arrays.num_slots)
        visible &= in_range
        slots = np.where(in_range, slots, 0).astype(np.int32)
    if arrays.sliding_window > 0 and arrays.positions is not None and arrays.slot_positions is not None:
        visible &= arrays.positions[rows, None] - arrays.slot_positions[slots] < arrays.sliding_window
    consecutive = highest - lowest == keys - 1 and bool((np.diff(slots) == 1).all())
    blank = ~visible.any(axis=1) if mask_begin == 0 else np.zeros(1, dtype=np.bool_)
    return SessionPlan(
        row_begin=rows.start,
        row_end=rows.stop,
        slots=None if consecutive else torch.from_numpy(slots),
        slot_begin=int(slots[0]),
        key_count=keys,
        mask=None if visible.all() else _additive(visible),
        mask_begin=mask_begin,
        blank=torch.from_numpy(blank)[:, None, None] if blank.any() else None,
    )


def _visible(arrays: _HostArrays, session: int, rows: slice, first_key: int, keys: int) -> np.ndarray:
    """Return which keys from `first_key` on the rows see, [rows, keys - first_key] bool."""
    visible = np.arange(first_key, keys) < arrays.prefix_len[rows, None]
    tree_start = arrays.tree_start[session]
    begin = max(tree_start, first_key)
    end = min(keys, tree_start + arrays.tree_bits.shape[1])
    if end > begin:
        bits = arrays.tree_bits[rows, begin - tree_start : end - tree_start]
        visible[:, begin - first_key : end - first_key] |= bits
    return visible


def _additive(visible: np.ndarray) -> torch.Tensor:
    """[rows, 1, keys] float32: 0 where visible, -inf elsewhere."""
    return torch.from_numpy(np.where(visible, np.float32(0), np.float32(-np.inf)))[:, None, :]
