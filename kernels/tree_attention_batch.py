"""What one step of tree attention attends to: the arrays of a step, and what is derived from them once per step.

The arrays are the same for every layer, so everything that depends on them alone (gathered slot lists and masks on
the CPU) is computed at the first layer and kept on the batch.

Shapes: S sessions, T query rows of all sessions, W mask words, L keys of one session.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from outrider.kernels.backend import check_shape


@dataclass(frozen=True, kw_only=True, eq=False)
class TreeAttentionBatch:
    """Which keys each query row of a step may attend to.

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
    _cpu_plans: dict[tuple[int, int], CpuPlan] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        sessions, rows = self.key_len.shape[0], self.prefix_len.shape[0]
        check_shape("slot_table", self.slot_table, (sessions, "max_len"))
        check_shape("query_start", self.query_start, (sessions + 1,))
        check_shape("tree_start", self.tree_start, (sessions,))
        check_shape("key_len", self.key_len, (sessions,))
        check_shape("prefix_len", self.prefix_len, (rows,))
        check_shape("tree_mask", self.tree_mask, (rows, "words"))
        if self.tree_mask.dtype != torch.int64:
            raise ValueError(f"tree_mask: dtype {self.tree_mask.dtype} given, torch.int64 needed")
        for name in ("slot_table", "query_start", "tree_start", "prefix_len", "key_len"):
            _check_int32(name, getattr(self, name), self.tree_mask.device)
        if self.positions is not None:
            check_shape("positions", self.positions, (rows,))
            _check_int32("positions", self.positions, self.tree_mask.device)
        if self.slot_positions is not None:
            check_shape("slot_positions", self.slot_positions, ("num_slots",))
            _check_int32("slot_positions", self.slot_positions, self.tree_mask.device)
        if self.max_key_len > self.slot_table.shape[1]:
            raise ValueError(f"max_key_len: {self.max_key_len} given, at most {self.slot_table.shape[1]} needed")
        if self.split_keys is not None and self.split_keys < 1:
            raise ValueError(f"split_keys: {self.split_keys} given, at least 1 needed")

    def cpu_plan(self, num_slots: int, sliding_window: int) -> CpuPlan:
        """The CPU plan for caches of `num_slots` slots and this window, built at its first use."""
        key = (num_slots, sliding_window)
        plan = self._cpu_plans.get(key)
        if plan is None:
            plan = self._cpu_plans[key] = _plan_cpu(self, num_slots, sliding_window)
        return plan


def _check_int32(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    if tensor.dtype != torch.int32:
        raise ValueError(f"{name}: dtype {tensor.dtype} given, torch.int32 needed")
    if tensor.device != device:
        raise ValueError(f"{name}: device {tensor.device} given, {device} (that of tree_mask) needed")


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
class CpuPlan:
    """The sessions that have rows and keys, and whether their rows are all rows of the batch."""

    sessions: tuple[SessionPlan, ...]
    covers_all_rows: bool


def _plan_cpu(batch: TreeAttentionBatch, num_slots: int, sliding_window: int) -> CpuPlan:
    query_start = batch.query_start.tolist()
    rows = batch.prefix_len.shape[0]
    words = np.ascontiguousarray(batch.tree_mask.numpy())
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little").view(np.bool_)
    sessions = []
    covered = 0
    for session, key_len in enumerate(batch.key_len.tolist()):
        begin, end = min(query_start[session], rows), min(query_start[session + 1], rows)
        if end <= begin or key_len <= 0:
            continue
        covered += end - begin
        sessions.append(_plan_session(batch, session, begin, end, min(key_len, batch.slot_table.shape[1]), bits,
                                      num_slots, sliding_window))  # fmt: skip
    return CpuPlan(sessions=tuple(sessions), covers_all_rows=covered == rows)


def _plan_session(
    batch: TreeAttentionBatch,
    session: int,
    begin: int,
    end: int,
    key_len: int,
    bits: np.ndarray,
    num_slots: int,
    sliding_window: int,
) -> SessionPlan:
    prefix_len = batch.prefix_len.numpy()[begin:end]
    tree_start = int(batch.tree_start[session])
    slot_row = batch.slot_table[session, :key_len]
    slots = slot_row.numpy()
    inside = (slots >= 0) & (slots < num_slots)
    plain = sliding_window <= 0 and bool(inside.all())
    # Without a window, what every row sees needs no mask; with one, any key may be hidden.
    mask_begin = max(min(int(prefix_len.min()), key_len), 0) if plain else 0
    visible = np.arange(mask_begin, key_len) < prefix_len[:, None]
    first = max(tree_start, mask_begin)
    last = min(key_len, tree_start + bits.shape[1])
    if last > first:
        visible[:, first - mask_begin : last - mask_begin] |= bits[begin:end, first - tree_start : last - tree_start]
    if not plain:
        visible &= inside
        slots = np.where(inside, slots, 0).astype(np.int32)
        slot_row = torch.from_numpy(slots)
    if sliding_window > 0:
        assert batch.positions is not None and batch.slot_positions is not None
        distance = batch.positions.numpy()[begin:end, None] - batch.slot_positions.numpy()[slots]
        visible &= distance < sliding_window
    consecutive = bool((np.diff(slots) == 1).all())
    all_visible = bool(visible.all())
    seen = visible.any(axis=1) if mask_begin == 0 else None
    return SessionPlan(
        row_begin=begin,
        row_end=end,
        slots=None if consecutive else slot_row,
        slot_begin=int(slots[0]),
        key_count=key_len,
        mask=None if all_visible else _additive(visible),
        mask_begin=mask_begin,
        blank=None if seen is None or bool(seen.all()) else torch.from_numpy(~seen)[:, None, None],
    )


def _additive(visible: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.where(visible, np.float32(0), np.float32(-np.inf)))[:, None, :]
