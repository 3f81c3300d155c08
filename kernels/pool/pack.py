"""The rows of a step: each session's own rows, then its selected entries in index order, session after session.

    target      the root, then the entries. KV slots are those of the session's table from index length - 1 on.
    drafter     committed tokens from index `cached` on, as many as were selected, then the entries. Slots come from the
                queue of free ones, in the order of the step's rows. The slots of all entries that have KV after the
                step, in index order, are written into the table behind those of the committed tokens: what the step may
                attend to.

A row attends to the keys before `prefix_len`, and to those behind `tree_start` whose bit is set in its mask: bit j is
key tree_start + j. In a target's pool tree_start = length - 1 and bit j stands for the session's j-th row. In a
drafter's pool tree_start = `cached` after the step, and bit j stands for the j-th entry with KV.

In a target's round with prefill, `pack_chunks` of `outrider.kernels.pool.prefill` puts chunks behind what `pack` wrote:
into rows that the bucket does not count (`extra_rows`) and into sessions that `select` left free.

Shapes: R rows of the bucket and extra ones, N sessions of the bucket, W mask words, and as in `columns.py`.
"""

# compile-time parameters of kernels are upper case; a kernel is one function
# ruff: noqa: N803, PLR0912, PLR0915

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from outrider.kernels.argument_checks import check_at_least, check_place
from outrider.kernels.backend import jit, tl, triton, uses_triton
from outrider.kernels.compiled import compiled
from outrider.kernels.early_launch import early_options
from outrider.kernels.pool.columns import Columns, Pool, PoolArrays, arrays_type
from outrider.kernels.pool.select import Selection, SelectionArrays

__all__ = ["COMMITTED", "PADDING", "ROOT", "Packed", "pack", "pack_reference"]

ROOT = -1
"""In `Packed.entries`: the row's token is the root."""
COMMITTED = -2
"""In `Packed.entries`: the row's token is a committed one before the root."""
PADDING = -3
"""In `Packed.entries`: the row is of no session."""

# Bytes at a multiple of which every column begins.
_ALIGNED = 128
# Committed tokens of a session that are written at a time.
_OWN_ROWS = tl.constexpr(16)
_ROOT, _COMMITTED, _PADDING = tl.constexpr(ROOT), tl.constexpr(COMMITTED), tl.constexpr(PADDING)


@dataclass(frozen=True, kw_only=True, eq=False)
class Packed(Columns):
    """The rows of a step, as the forward pass and what follows take them. Build one with `allocate`.

    Attributes:
        tokens, positions: [R] int32; 0 for padding.
        slots: [R] int32, where the row's key and value are stored; `scrap_slot` for padding.
        entries: [R] int32: the row's entry of the pool, or ROOT, COMMITTED, PADDING.
        parents: [R] int32: the row of the token before it in this step, -1 if there is none.
        sessions: [R] int32: number of the row's session in the step, -1 for padding.
        prefix_len: [R] int32: keys before the tree that the row attends to; 0 for padding.
        tree_mask: [R, W] int64: bits of further keys; 0 for padding.
        pool_rows: [N] int32: the session's row of the pool, -1 for a session that is not there.
        query_start: [N + 1] int32: each session's first row; behind the last session the count of rows, up to the end.
        tree_start, key_len: [N] int32: the key that bit 0 stands for; all keys. 0 for a session that is not there.
        scrap_slot: a slot that nobody reads.
        extra_rows: how many of the R rows the bucket does not count.
        words: [..] int64: all columns in one piece, for ranks that get a step whole.
    """

    KERNELS_ALONE: ClassVar = ("words",)
    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    entries: torch.Tensor
    parents: torch.Tensor
    sessions: torch.Tensor
    prefix_len: torch.Tensor
    tree_mask: torch.Tensor
    pool_rows: torch.Tensor
    query_start: torch.Tensor
    tree_start: torch.Tensor
    key_len: torch.Tensor
    words: torch.Tensor
    scrap_slot: int
    extra_rows: int = 0

    @classmethod
    def allocate(cls, pool: Pool, bucket: tuple[int, int, int, int], *, scrap_slot: int, extra_rows: int = 0) -> Packed:
        """Return room for a bucket's steps.

        Args:
            pool: whose steps.
            bucket: rows, N, most rows of a session, and most entries, as `Selection.allocate` takes it.
            scrap_slot: where padding stores its key and value.
            extra_rows: rows for chunks, beside those of the bucket.

        Raises:
            ValueError: a size below 1, or `extra_rows` below 0.
        """
        for name, size in zip(("rows", "sessions", "most rows of a session", "most entries"), bucket, strict=True):
            check_at_least(name, size, 1)
        check_at_least("extra_rows", extra_rows, 0)
        rows, sessions, most, entries = bucket
        # In a target's pool every row of a session has a bit, in a drafter's every entry with KV.
        words = -(-(min(most, 1 + entries) if pool.nodes is None else pool.capacity) // 64)
        return cls.of_shape(
            rows=rows + extra_rows,
            sessions=sessions,
            mask_words=words,
            scrap_slot=scrap_slot,
            extra_rows=extra_rows,
            device=pool.device,
        )

    @classmethod
    def of_shape(
        cls, *, rows: int, sessions: int, mask_words: int, scrap_slot: int, device: torch.device, extra_rows: int = 0
    ) -> Packed:
        """Return room for steps of R rows, N sessions and W mask words; equal shapes have equal layouts of `words`."""
        shapes = {"tree_mask": (rows, mask_words)}
        shapes |= dict.fromkeys(
            ("tokens", "positions", "slots", "entries", "parents", "sessions", "prefix_len"), (rows,)
        )
        shapes |= dict.fromkeys(("pool_rows", "tree_start", "key_len"), (sessions,))
        shapes["query_start"] = (sessions + 1,)
        # int64 words that each column takes, up to a multiple of 128 bytes.
        sizes = {
            name: -(-math.prod(shape) * (8 if name == "tree_mask" else 4) // _ALIGNED) * (_ALIGNED // 8)
            for name, shape in shapes.items()
        }
        words = torch.zeros(sum(sizes.values()), dtype=torch.int64, device=device)
        columns, begin = {}, 0
        for name, shape in shapes.items():
            part = words[begin : begin + sizes[name]]
            part = part if name == "tree_mask" else part.view(torch.int32)
            columns[name] = part[: math.prod(shape)].view(shape)
            begin += sizes[name]
        return cls(words=words, scrap_slot=scrap_slot, extra_rows=extra_rows, **columns)


PackedArrays = arrays_type(Packed)


def pack(pool: Pool, selection: Selection, packed: Packed) -> None:
    """Write the rows of a step.

    Args:
        pool: read; in a drafter's pool all rows of the step get their slots, and count as cached or expanded.
        selection: what `select` found for the bucket that `packed` was allocated for.
        packed: written.

    Raises:
        ValueError: something on another device.
    """
    check_place("packed", packed.tokens, pool.device, "pool")
    if uses_triton(packed.tokens):
        _launch(pool, selection, packed)
    else:
        pack_reference(pool, selection, packed)


def pack_reference(pool: Pool, selection: Selection, packed: Packed) -> None:
    """`pack` on a CPU, one session after the other."""
    _pack(pool.arrays, selection.arrays, packed.arrays, packed.scrap_slot)


@compiled
def _pack(pool_arrays: Any, selection_arrays: Any, arrays: Any, scrap_slot: int) -> None:
    pool, selection, packed = PoolArrays(*pool_arrays), SelectionArrays(*selection_arrays), PackedArrays(*arrays)
    num_selected, rank, own_rows = selection.num_selected, selection.rank, selection.own_rows
    tokens, positions, slots, entries = packed.tokens, packed.positions, packed.slots, packed.entries
    parents, sessions, prefix_len, tree_mask = packed.parents, packed.sessions, packed.prefix_len, packed.tree_mask
    pool_rows, query_start, tree_start, key_len = (
        packed.pool_rows,
        packed.query_start,
        packed.tree_start,
        packed.key_len,
    )
    drafts = len(pool.slot) > 0
    at, session = 0, 0
    # Bit and row of each entry of the session, -1 if it has none.
    bit_of, row_of = np.empty(rank.shape[1], np.int64), np.empty(rank.shape[1], np.int64)
    tree_mask[:] = 0
    for row in range(len(num_selected)):
        length, own, cached = pool.length[row], own_rows[row], pool.cached[row]
        if num_selected[row] < 0 or own + num_selected[row] == 0:
            continue
        start = cached + own if drafts else length - 1
        pool_rows[session], query_start[session], tree_start[session] = row, at, start
        for number in range(own):
            index = (cached if drafts else length - 1) + number
            tokens[at], positions[at] = pool.history[row, index], index
            entries[at] = ROOT if index == length - 1 else COMMITTED
            parents[at] = at - 1 if number > 0 else -1
            sessions[at] = session
            if drafts:
                prefix_len[at] = index + 1
                slots[at] = _pop_slot(pool)
                pool.table[row, index] = slots[at]
            else:
                prefix_len[at] = start
                slots[at] = pool.table[row, index]
                tree_mask[at, 0] = 1
            at += 1
        root_row = at - 1 if own > 0 else -1
        if drafts:
            pool.cached[row] = start
        bits = 0 if drafts else 1
        for entry in range(pool.count[row]):
            bit_of[entry] = row_of[entry] = -1
            is_selected = rank[row, entry] < num_selected[row]
            if is_selected:
                parent = pool.parent[row, entry]
                tokens[at], positions[at] = pool.token[row, entry], length - 1 + pool.depth[row, entry]
                entries[at], sessions[at], prefix_len[at] = entry, session, start
                parents[at] = root_row if parent < 0 else row_of[parent]
                row_of[entry] = at
                if drafts:
                    slots[at] = _pop_slot(pool)
                    pool.slot[row, entry], pool.expanded[row, entry] = slots[at], True
                else:
                    slots[at] = pool.table[row, start + bits]
                at += 1
            if is_selected or (drafts and pool.expanded[row, entry]):
                bit_of[entry] = bits
                if drafts:
                    pool.table[row, start + bits] = pool.slot[row, entry]
                bits += 1
            if is_selected:
                if not drafts:
                    tree_mask[at - 1, 0] = 1
                above = entry
                while above >= 0:
                    tree_mask[at - 1, bit_of[above] >> 6] |= np.int64(1) << (bit_of[above] & 63)
                    above = pool.parent[row, above]
        key_len[session] = start + bits
        session += 1
    query_start[session] = at
    for row in range(at, len(tokens)):
        tokens[row] = positions[row] = prefix_len[row] = 0
        slots[row], entries[row], parents[row], sessions[row] = scrap_slot, PADDING, -1, -1
    for number in range(session, len(pool_rows)):
        pool_rows[number], tree_start[number], key_len[number] = -1, 0, 0
        query_start[number + 1] = at


@compiled
def _pop_slot(pool: Any) -> int:
    slot = pool.free[pool.free_head[0] & (len(pool.free) - 1)]
    pool.free_head[0] += 1
    return slot


def _launch(pool: Pool, selection: Selection, packed: Packed) -> None:
    nodes, none = pool.nodes, pool.count
    rows, words = packed.tree_mask.shape
    _pack_kernel[(pool.sessions,)](
        selection.num_selected,
        selection.rank,
        selection.own_rows,
        selection.first_row,
        selection.number,
        selection.totals,
        pool.count,
        pool.token,
        pool.parent,
        pool.depth,
        pool.length,
        pool.cached,
        pool.history,
        pool.table,
        none if nodes is None else nodes.slot,
        none if nodes is None else nodes.expanded,
        none if nodes is None else nodes.free,
        none if nodes is None else nodes.free_head,
        selection.first_slot,
        packed.tokens,
        packed.positions,
        packed.slots,
        packed.entries,
        packed.parents,
        packed.sessions,
        packed.prefix_len,
        packed.tree_mask,
        packed.pool_rows,
        packed.query_start,
        packed.tree_start,
        packed.key_len,
        rows,
        packed.pool_rows.shape[0],
        packed.scrap_slot,
        pool.max_len,
        pool.table.shape[1],
        1 if nodes is None else nodes.free.shape[0],
        S=pool.sessions,
        C=pool.capacity,
        W=words,
        BLOCK_W=triton.next_power_of_2(words),
        BLOCK_PAD=triton.next_power_of_2(triton.cdiv(max(rows, packed.pool_rows.shape[0] + 1), pool.sessions)),
        DRAFTS=nodes is not None,
        num_warps=2 if words == 1 else 4,
        **early_options(pool.device),
    )


@jit(do_not_specialize=["rows", "places", "scrap_slot", "max_len", "table_width", "num_slots"])
def _pack_kernel(
    num_selected_ptr,  # [S] int32
    rank_ptr,  # [S, C] int32
    own_rows_ptr,  # [S] int32
    first_row_ptr,  # [S] int32
    number_ptr,  # [S] int32
    totals_ptr,  # [2] int32
    count_ptr,  # [S] int32
    token_ptr,  # [S, C] int32
    parent_ptr,  # [S, C] int32
    depth_ptr,  # [S, C] int32
    length_ptr,  # [S] int32
    cached_ptr,  # [S] int32
    history_ptr,  # [S, max_len] int32
    table_ptr,  # [S, table_width] int32
    slot_ptr,  # [S, C] int32
    expanded_ptr,  # [S, C] bool
    free_ptr,  # [num_slots] int32
    free_head_ptr,  # [1] int64
    first_slot_ptr,  # [1] int64
    tokens_ptr,  # [R] int32
    positions_ptr,  # [R] int32
    slots_ptr,  # [R] int32
    entries_ptr,  # [R] int32
    parents_ptr,  # [R] int32
    sessions_ptr,  # [R] int32
    prefix_len_ptr,  # [R] int32
    tree_mask_ptr,  # [R, W] int64
    pool_rows_ptr,  # [N] int32
    query_start_ptr,  # [N + 1] int32
    tree_start_ptr,  # [N] int32
    key_len_ptr,  # [N] int32
    rows,
    places,
    scrap_slot,
    max_len,
    table_width,
    num_slots,
    S: tl.constexpr,
    C: tl.constexpr,
    W: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_PAD: tl.constexpr,
    DRAFTS: tl.constexpr,
    EARLY: tl.constexpr,
):
    # The forward pass reads these arrays before its `gdc_wait`: no `gdc_launch_dependents` here.
    if EARLY:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    index, word = tl.arange(0, C), tl.arange(0, BLOCK_W)
    entry = row * C + index
    num_selected, own, first = (
        tl.load(num_selected_ptr + row),
        tl.load(own_rows_ptr + row),
        tl.load(first_row_ptr + row),
    )
    session, length = tl.load(number_ptr + row), tl.load(length_ptr + row)
    total, sessions = tl.load(totals_ptr), tl.load(totals_ptr + 1)
    rank, parent = tl.load(rank_ptr + entry), tl.load(parent_ptr + entry)
    token, depth = tl.load(token_ptr + entry), tl.load(depth_ptr + entry)
    history, table = history_ptr + row.to(tl.int64) * max_len, table_ptr + row.to(tl.int64) * table_width
    count = tl.load(count_ptr + row)
    if not DRAFTS:
        root = tl.load(history + length - 1, mask=length > 0, other=0)
        in_table = (length > 0) & (length - 1 + index < table_width)
        table_slots = tl.load(table + length - 1 + index, mask=in_table, other=0)
    if DRAFTS:
        first_slot = tl.load(first_slot_ptr)
        if row == 0:
            tl.store(free_head_ptr, first_slot + total)

    # Padding of the bucket, shared between all programs.
    padding = total + row + S * tl.arange(0, BLOCK_PAD)
    is_padding = padding < rows
    none = tl.full((BLOCK_PAD,), -1, tl.int32)
    nothing = tl.zeros((BLOCK_PAD,), tl.int32)
    tl.store(tokens_ptr + padding, nothing, mask=is_padding)
    tl.store(positions_ptr + padding, nothing, mask=is_padding)
    tl.store(slots_ptr + padding, nothing + scrap_slot, mask=is_padding)
    tl.store(entries_ptr + padding, nothing + _PADDING, mask=is_padding)
    tl.store(parents_ptr + padding, none, mask=is_padding)
    tl.store(sessions_ptr + padding, none, mask=is_padding)
    tl.store(prefix_len_ptr + padding, nothing, mask=is_padding)
    no_mask = tl.zeros((BLOCK_PAD, BLOCK_W), tl.int64)
    tl.store(
        tree_mask_ptr + padding[:, None] * W + word[None, :], no_mask, mask=is_padding[:, None] & (word < W)[None, :]
    )
    absent = sessions + row + S * tl.arange(0, BLOCK_PAD)
    is_absent = absent < places
    tl.store(pool_rows_ptr + absent, none, mask=is_absent)
    tl.store(tree_start_ptr + absent, nothing, mask=is_absent)
    tl.store(key_len_ptr + absent, nothing, mask=is_absent)
    tl.store(query_start_ptr + absent, nothing + total, mask=absent <= places)

    if (num_selected >= 0) & (own + num_selected > 0):
        live = index < count
        selected = live & (rank < num_selected)
        keyed = selected
        start = length - 1
        own_bits = 1 + 0
        if DRAFTS:
            expanded = (tl.load(expanded_ptr + entry) != 0) & live
            keyed = selected | expanded
            cached = tl.load(cached_ptr + row)
            start = cached + own
            own_bits = 0 + 0
        bit = own_bits + tl.cumsum(keyed.to(tl.int32), 0) - 1
        at = first + own + tl.cumsum(selected.to(tl.int32), 0) - 1
        above = tl.maximum(parent, 0)
        root_row = tl.where(own > 0, first + own - 1, -1)
        row_above = tl.gather(tl.where(selected, at, -1), above, 0)
        tl.store(tokens_ptr + at, token, mask=selected)
        tl.store(positions_ptr + at, length - 1 + depth, mask=selected)
        tl.store(entries_ptr + at, index, mask=selected)
        tl.store(parents_ptr + at, tl.where(parent < 0, root_row, row_above), mask=selected)
        tl.store(sessions_ptr + at, tl.zeros_like(index) + session, mask=selected)
        tl.store(prefix_len_ptr + at, tl.zeros_like(index) + start, mask=selected)
        if DRAFTS:
            slot = tl.load(slot_ptr + entry)
            given = tl.load(free_ptr + ((first_slot + at) & (num_slots - 1)), mask=selected)
            slot = tl.where(selected, given, slot)
            tl.store(slots_ptr + at, slot, mask=selected)
            tl.store(slot_ptr + entry, slot, mask=selected)
            tl.store(expanded_ptr + entry, selected, mask=selected)
            tl.store(table + start + bit, slot, mask=keyed)
            for begin in range(0, own, _OWN_ROWS):
                number = begin + tl.arange(0, _OWN_ROWS)
                is_own = number < own
                own_slot = tl.load(free_ptr + ((first_slot + first + number) & (num_slots - 1)), mask=is_own)
                tl.store(tokens_ptr + first + number, tl.load(history + cached + number, mask=is_own), mask=is_own)
                tl.store(positions_ptr + first + number, cached + number, mask=is_own)
                tl.store(slots_ptr + first + number, own_slot, mask=is_own)
                tl.store(table + cached + number, own_slot, mask=is_own)
                kind = tl.where(cached + number == length - 1, _ROOT, _COMMITTED)
                tl.store(entries_ptr + first + number, kind, mask=is_own)
                tl.store(parents_ptr + first + number, tl.where(number > 0, first + number - 1, -1), mask=is_own)
                tl.store(sessions_ptr + first + number, tl.zeros_like(number) + session, mask=is_own)
                tl.store(prefix_len_ptr + first + number, cached + number + 1, mask=is_own)
                own_mask = is_own[:, None] & (word < W)[None, :]
                own_words = tree_mask_ptr + (first + number)[:, None] * W + word[None, :]
                tl.store(own_words, tl.zeros((_OWN_ROWS, BLOCK_W), tl.int64), mask=own_mask)
            tl.store(cached_ptr + row, start)
        else:
            # The session's rows take the table's slots one after the other, the root first.
            tl.store(slots_ptr + first + index, table_slots, mask=index < 1 + num_selected)
            if num_selected == C:
                tl.store(slots_ptr + first + C, tl.load(table + length - 1 + C))
            tl.store(tokens_ptr + first, root)
            tl.store(positions_ptr + first, length - 1)
            tl.store(entries_ptr + first, tl.full((), _ROOT, tl.int32))
            tl.store(parents_ptr + first, tl.full((), -1, tl.int32))
            tl.store(sessions_ptr + first, session)
            tl.store(prefix_len_ptr + first, start)
            tl.store(tree_mask_ptr + first * W + word, (word == 0).to(tl.int64), mask=word < W)

        # Ancestors by pointer doubling: the bits set so far, and the nearest ancestor not yet included.
        mask = tl.where(
            (bit[:, None] >> 6) == word[None, :], tl.full((), 1, tl.int64) << (bit & 63).to(tl.int64)[:, None], 0
        )
        mask = tl.where(keyed[:, None], mask, 0)
        next_above = tl.where(keyed, parent, -1)
        further = tl.max(next_above)
        while further >= 0:
            reached = tl.maximum(next_above, 0)
            theirs = tl.gather(mask, tl.zeros((C, BLOCK_W), tl.int32) + reached[:, None], 0)
            mask |= tl.where((next_above >= 0)[:, None], theirs, 0)
            next_above = tl.where(next_above >= 0, tl.gather(next_above, reached, 0), -1)
            further = tl.max(next_above)
        if own_bits > 0:
            mask |= (word == 0).to(tl.int64)[None, :]
        tl.store(tree_mask_ptr + at[:, None] * W + word[None, :], mask, mask=selected[:, None] & (word < W)[None, :])
        tl.store(pool_rows_ptr + session, row)
        tl.store(query_start_ptr + session, first)
        tl.store(tree_start_ptr + session, start)
        tl.store(key_len_ptr + session, start + own_bits + tl.sum(keyed.to(tl.int32)))
