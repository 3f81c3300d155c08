"""Selection: the best entries of all rows, as many as fit into a bucket, and what every other bucket would gain.

A bucket is a shape of forward pass: its rows, its sessions, the most rows of one session, and the most entries. A
session that takes part needs some rows of its own first: in a target's pool one for its root, in a drafter's pool one
for each committed token of its gap, those without KV. What is left goes to the entries of highest value, up to the most
entries. A value never exceeds its parent's and equal values go to the lower row, then to the lower entry, so what is
selected is closed under ancestors.

A gap of at most `SHORT_GAP` tokens is taken whole. Longer ones share a step's `chunk`, lower rows first: each takes as
much as is left, and a session for which nothing is left waits. A session whose gap is not taken to its end has no
entries in the step.

    row (target)        RUNNING, length < min(end, allow), a slot for its root
    row (drafter)       RUNNING, length < end, something to do, a part of the chunk if its gap is long
    entry (target)      depth < max_depth, neither it nor an ancestor is a stop token in force,
                        length + depth < min(end, allow)
    entry (drafter)     no KV yet, depth < max_depth, no stop token, length + depth < end
    gain of a bucket    sum of value * 2^24 over what it would take, each rounded: no order of addition decides

If the running sessions do not fit into the launched bucket, sessions join from `turn` on until one does not fit; the
next selection begins with that one. A session that needs more rows of its own than the launched bucket has, in all or
for one session, takes no part. Every bucket that is too small for all running sessions has gain -1.

Rows are sorted by value first, each by its own program; then one program a bucket searches the value at which it is
full, over all sorted rows at once. Shapes: B buckets, and as in `columns.py`.
"""

# compile-time parameters of kernels are upper case; a kernel is one function
# ruff: noqa: N803, PLR0912, PLR0915

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from outrider.kernels.argument_checks import check_place
from outrider.kernels.backend import jit, tl, triton, uses_triton
from outrider.kernels.compiled import compiled
from outrider.kernels.early_launch import early_options
from outrider.kernels.pool.columns import Columns, Pool, PoolArrays, RowState, arrays_type

__all__ = ["GAIN_SCALE", "SHORT_GAP", "Selection", "select", "select_reference"]

GAIN_SCALE = 1 << 24
"""Gains count entries in units of 1 / GAIN_SCALE."""
SHORT_GAP = 16
"""Most committed tokens without KV that a session of a drafter's pool takes into a step whole."""

_SCALE = tl.constexpr(float(GAIN_SCALE))
# Bits above those of every number, infinity included.
_ABOVE_ALL = tl.constexpr(0x7F800001)
_RUNNING = tl.constexpr(int(RowState.RUNNING))
_SHORT_GAP = tl.constexpr(SHORT_GAP)
# Block size of the pairwise comparison that sorts a row.
_CHUNK = 64
# Sorted entries a row that the search reads at once; few rows have more.
_WIDTH = 64


@dataclass(frozen=True, kw_only=True, eq=False)
class Selection(Columns):
    """The selection of a step, and scratch for computing it. Build one with `allocate`.

    Attributes:
        buckets: [B, 4] int32, given: rows, sessions, most rows of a session, most entries of all.
        least_value: [1] float32, given: entries below it are left out; 0 leaves none out.
        reserved_sessions: [1] int32, given: sessions of every bucket that are not for these rows. `take_chunks` of
            `outrider.kernels.pool.prefill` sets it to its chunks, `pack_chunks` back to 0: a round without prefill
            finds 0.
        num_selected: [S] int32: entries that the row contributes, its best ones; -1 where it takes no part.
        rank: [S, C] int32: how many eligible entries of the row are better; C where an entry is not eligible.
        own_rows: [S] int32: rows that the session needs before any entry; 0 where it takes no part in any bucket.
        needed: [1] int32: sum of the rows that all running sessions need before any entry, fit they or not.
        first_row: [S] int32: the row's first of the step.
        number: [S] int32: the row's number among the sessions of the step.
        totals: [2] int32: rows and sessions of the step.
        gains: [B] int64: of each bucket; -1 where the running sessions do not fit.
        turn: [1] int32: the row that comes first when not all fit.
        first_slot: [1] int64: `NodeSlots.free_head` before the rows of the step take theirs, in a drafter's pool.
        limit: [S] int32, scratch: most entries of the row, -1 where it cannot take part.
        keys, ordered: [S', C] int32, scratch: bits of the values of each row's entries, -1 where one is not eligible;
            and those of the eligible ones, best first. S' is S up to a power of two.
    """

    KERNELS_ALONE: ClassVar = ("keys", "ordered")
    buckets: torch.Tensor
    least_value: torch.Tensor
    reserved_sessions: torch.Tensor
    num_selected: torch.Tensor
    rank: torch.Tensor
    own_rows: torch.Tensor
    needed: torch.Tensor
    first_row: torch.Tensor
    number: torch.Tensor
    totals: torch.Tensor
    gains: torch.Tensor
    turn: torch.Tensor
    first_slot: torch.Tensor
    limit: torch.Tensor
    keys: torch.Tensor
    ordered: torch.Tensor

    @classmethod
    def allocate(cls, pool: Pool, buckets: list[tuple[int, int, int, int]]) -> Selection:
        """Return room for selections from a pool.

        Args:
            pool: what is selected from.
            buckets: rows, sessions, most rows of a session, and most entries of all sessions, of each.

        Raises:
            ValueError: no bucket, or one with a size below 1.
        """
        if not buckets or any(size < 1 for bucket in buckets for size in bucket):
            raise ValueError(f"buckets: {buckets} given, at least one and sizes of at least 1 needed")
        device, sessions, capacity = pool.device, pool.sessions, pool.capacity
        triton_rows = 1 << (sessions - 1).bit_length()

        def column(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            buckets=torch.tensor(buckets, dtype=torch.int32, device=device),
            least_value=column(1, dtype=torch.float32),
            reserved_sessions=column(1),
            num_selected=column(sessions),
            rank=column(sessions, capacity),
            own_rows=column(sessions),
            needed=column(1),
            first_row=column(sessions),
            number=column(sessions),
            totals=column(2),
            gains=column(len(buckets), dtype=torch.int64),
            turn=column(1),
            first_slot=column(1, dtype=torch.int64),
            limit=column(sessions),
            keys=column(triton_rows, capacity),
            ordered=column(triton_rows, capacity),
        )


SelectionArrays = arrays_type(Selection)


def select(pool: Pool, selection: Selection, launched: int, *, children: int = 0, chunk: int = 0) -> None:
    """Select entries for the launched bucket, and compute the gain of every bucket.

    Args:
        pool: read.
        selection: written.
        launched: number of the bucket.
        children: most children of an expanded entry, in a drafter's pool; keeps the live entries within `max_nodes`.
        chunk: most committed tokens of long gaps in a step, in a drafter's pool.

    Raises:
        ValueError: a number or a device that does not fit.
    """
    if not 0 <= launched < selection.buckets.shape[0]:
        raise ValueError(f"launched: {launched} given, one of {selection.buckets.shape[0]} buckets needed")
    check_place("selection", selection.rank, pool.device, "pool")
    for name, given in (("children", children), ("chunk", chunk)):
        if pool.nodes is not None and given < 1:
            raise ValueError(f"{name}: {given} given, at least 1 needed for the pool of a drafter")
    if uses_triton(selection.rank):
        _launch(pool, selection, launched, children, chunk)
    else:
        select_reference(pool, selection, launched, children=children, chunk=chunk)


def select_reference(pool: Pool, selection: Selection, launched: int, *, children: int = 0, chunk: int = 0) -> None:
    """`select` on a CPU: one sort of all eligible entries, then one pass over them for each bucket."""
    _select(pool.arrays, selection.arrays, launched, children, chunk)


@compiled
def _select(pool_arrays: Any, arrays: Any, launched: int, children: int, chunk: int) -> None:
    pool, selection = PoolArrays(*pool_arrays), SelectionArrays(*arrays)
    buckets, num_selected, rank, own_rows = (
        selection.buckets,
        selection.num_selected,
        selection.rank,
        selection.own_rows,
    )
    first_row, number, totals, gains = selection.first_row, selection.number, selection.totals, selection.gains
    turn, limit, least_value = selection.turn, selection.limit, selection.least_value[0]
    sessions, capacity = rank.shape
    drafts = len(pool.slot) > 0
    _share_chunk(pool, own_rows, chunk)
    keys = np.empty(sessions * capacity, np.int64)
    candidates = 0
    values = pool.value.view(np.int32)
    for row in range(sessions):
        limit[row] = _limit_of(pool, row, own_rows[row], children)
        rank[row] = capacity
        if limit[row] < 0:
            continue
        end = pool.end[row] if drafts else min(pool.end[row], pool.allow[row])
        before = candidates
        for entry in range(pool.count[row]):
            is_wanted = pool.value[row, entry] >= least_value and not pool.stopped[row, entry]
            is_wanted &= pool.depth[row, entry] < pool.max_depth[row]
            if drafts:
                is_wanted &= not pool.expanded[row, entry]
            # Bits of values are ordered as they are, but for -0.0.
            if is_wanted and values[row, entry] >= 0 and pool.length[row] + pool.depth[row, entry] < end:
                # Ascending, so that the last one is the best: the larger value, then the lower row and entry.
                flat = np.int64(0xFFFFFFFF) - (row * capacity + entry)
                keys[candidates] = np.int64(values[row, entry]) << 32 | flat
                candidates += 1
        limit[row] = min(limit[row], candidates - before)
        if drafts and own_rows[row] == 0 and limit[row] == 0:
            limit[row] = -1
    ordered = np.sort(keys[:candidates])
    # Of each candidate, best first.
    row_of, gain_of = np.empty(candidates, np.int64), np.empty(candidates, np.int64)
    seen = np.zeros(sessions, np.int32)
    for candidate in range(candidates):
        flat = 0xFFFFFFFF - (ordered[candidates - 1 - candidate] & 0xFFFFFFFF)
        row, entry = flat // capacity, flat % capacity
        rank[row, entry] = seen[row]
        seen[row] += 1
        row_of[candidate] = row
        gain_of[candidate] = np.int64(np.float64(pool.value[row, entry]) * GAIN_SCALE + 0.5)

    needed, running, most_own = 0, 0, 0
    for row in range(sessions):
        if limit[row] < 0:
            own_rows[row] = 0
        else:
            running += 1
        needed += own_rows[row]
        most_own = max(most_own, own_rows[row])
    selection.needed[0] = needed
    slots = pool.free_tail[0] - pool.free_head[0]
    takes_part = np.empty(sessions, np.bool_)
    for bucket in range(len(buckets)):
        rows, places, most = buckets[bucket, 0], buckets[bucket, 1] - selection.reserved_sessions[0], buckets[bucket, 2]
        if drafts:
            rows = min(rows, slots)
        for row in range(sessions):
            takes_part[row] = limit[row] >= 0 and own_rows[row] <= min(most, rows)
        fits = running <= places and needed <= rows and most_own <= most
        if not fits:
            if bucket != launched:
                gains[bucket] = -1
                continue
            _rotate(rows, places, own_rows, turn, takes_part)
        room = rows
        for row in range(sessions):
            room -= own_rows[row] if takes_part[row] else 0
        room = min(room, buckets[bucket, 3])
        seen[:] = 0
        gain = np.int64(0)
        for candidate in range(candidates):
            if room == 0:
                break
            row = row_of[candidate]
            if takes_part[row] and seen[row] < min(limit[row], most - own_rows[row]):
                seen[row] += 1
                room -= 1
                gain += gain_of[candidate]
        gains[bucket] = gain if fits else -1
        if bucket == launched:
            first, count = 0, 0
            for row in range(sessions):
                num_selected[row] = seen[row] if takes_part[row] else -1
                first_row[row], number[row] = first, count
                if takes_part[row] and own_rows[row] + seen[row] > 0:
                    first += own_rows[row] + seen[row]
                    count += 1
            totals[0], totals[1] = first, count
    selection.first_slot[0] = pool.free_head[0]


@compiled
def _share_chunk(pool: Any, own_rows: Any, chunk: int) -> None:
    """Write the rows that each session needs before any entry; -1 where it is not running."""
    drafts = len(pool.slot) > 0
    for row in range(len(own_rows)):
        length = pool.length[row]
        is_running = pool.state[row] == RowState.RUNNING and length < pool.end[row]
        own_rows[row] = 1
        if drafts:
            own_rows[row] = gap = length - pool.cached[row]
            if is_running and gap > SHORT_GAP:
                own_rows[row] = min(gap, chunk)
                chunk -= own_rows[row]
        else:
            is_running &= length < pool.allow[row] and pool.table_len[row] >= length
        if not is_running:
            own_rows[row] = -1


@compiled
def _limit_of(pool: Any, row: int, own_rows: int, children: int) -> int:
    """Return the most entries that a row may have beside its own rows, -1 if it takes no part."""
    length = pool.length[row]
    if own_rows < 0:
        return -1
    if len(pool.slot) == 0:
        return min(pool.max_nodes[row], pool.table_len[row] - length)
    if own_rows < length - pool.cached[row]:
        return 0
    room = min(pool.token.shape[1], pool.max_nodes[row]) - pool.count[row]
    return max(room // children - min(own_rows, 1), 0)


@compiled
def _rotate(rows: int, places: int, own_rows: Any, turn: Any, takes_part: Any) -> None:
    """Mark the rows that take part when not all fit: from `turn` on, up to the first that does not fit."""
    sessions, first, is_full = len(takes_part), turn[0], False
    for step in range(sessions):
        row = (first + step) % sessions
        if takes_part[row] and not is_full and (places < 1 or rows < own_rows[row]):
            turn[0] = row
            is_full = True
        if takes_part[row]:
            takes_part[row] = not is_full
            places -= 1
            rows -= own_rows[row]


def _launch(pool: Pool, selection: Selection, launched: int, children: int, chunk: int) -> None:
    nodes, none = pool.nodes, pool.count
    sessions, capacity = pool.sessions, pool.capacity
    block_s, width = triton.next_power_of_2(sessions), min(_WIDTH, capacity)
    _order_kernel[(sessions,)](
        pool.count,
        pool.depth,
        pool.value,
        pool.stopped,
        pool.length,
        pool.cached,
        pool.state,
        pool.end,
        pool.allow,
        pool.table_len,
        pool.max_nodes,
        pool.max_depth,
        none if nodes is None else nodes.expanded,
        selection.least_value,
        selection.rank,
        selection.own_rows,
        selection.limit,
        selection.ordered,
        selection.keys,
        chunk,
        BLOCK_S=block_s,
        C=capacity,
        CHUNK=min(_CHUNK, capacity),
        CHILDREN=children,
        DRAFTS=nodes is not None,
        num_warps=4,
        **early_options(pool.device),
    )
    _fill_kernel[(selection.buckets.shape[0],)](
        selection.buckets,
        selection.reserved_sessions,
        selection.limit,
        selection.own_rows,
        selection.ordered,
        selection.needed,
        selection.num_selected,
        selection.first_row,
        selection.number,
        selection.totals,
        selection.gains,
        selection.turn,
        selection.turn if nodes is None else nodes.free_head,
        selection.turn if nodes is None else nodes.free_tail,
        selection.first_slot,
        launched,
        S=sessions,
        C=capacity,
        WIDTH=width,
        BLOCK_S=block_s,
        DRAFTS=nodes is not None,
        num_warps=min(max(block_s * width // 512, 1), 16),
        **early_options(pool.device),
    )


@jit(do_not_specialize=["chunk"])
def _order_kernel(
    count_ptr,  # [S] int32
    depth_ptr,  # [S, C] int32
    value_ptr,  # [S, C] float32
    stopped_ptr,  # [S, C] bool
    length_ptr,  # [S] int32
    cached_ptr,  # [S] int32
    state_ptr,  # [S] int8
    end_ptr,  # [S] int32
    allow_ptr,  # [S] int32
    table_len_ptr,  # [S] int32
    max_nodes_ptr,  # [S] int32
    max_depth_ptr,  # [S] int32
    expanded_ptr,  # [S, C] bool
    least_value_ptr,  # [1] float32
    rank_ptr,  # [S, C] int32
    own_rows_ptr,  # [S] int32
    limit_ptr,  # [S] int32
    ordered_ptr,  # [BLOCK_S, C] int32
    keys_ptr,  # [BLOCK_S, C] int32
    chunk,
    BLOCK_S: tl.constexpr,
    C: tl.constexpr,
    CHUNK: tl.constexpr,
    CHILDREN: tl.constexpr,
    DRAFTS: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    index = tl.arange(0, C)
    entry = row * C + index
    count, length, state = tl.load(count_ptr + row), tl.load(length_ptr + row), tl.load(state_ptr + row)
    end, max_nodes, least_value = tl.load(end_ptr + row), tl.load(max_nodes_ptr + row), tl.load(least_value_ptr)
    live = index < count
    depth, value = tl.load(depth_ptr + entry), tl.load(value_ptr + entry)
    wanted = live & (value >= least_value) & (tl.load(stopped_ptr + entry) == 0)
    wanted = wanted & (depth < tl.load(max_depth_ptr + row))
    if DRAFTS:
        wanted = wanted & (tl.load(expanded_ptr + entry) == 0)
        gap = length - tl.load(cached_ptr + row)
        running = (state == _RUNNING) & (length < end)
        # The rows before this one have first call on the chunk.
        other_row = tl.arange(0, BLOCK_S)
        is_before = other_row < row
        other_length = tl.load(length_ptr + other_row, mask=is_before, other=0)
        other_gap = other_length - tl.load(cached_ptr + other_row, mask=is_before, other=0)
        shares = (other_gap > _SHORT_GAP) & (other_length < tl.load(end_ptr + other_row, mask=is_before, other=0))
        shares = shares & (tl.load(state_ptr + other_row, mask=is_before, other=0) == _RUNNING)
        left = tl.maximum(chunk - tl.sum(tl.where(shares, other_gap, 0)), 0)
        own_rows = tl.where(gap > _SHORT_GAP, tl.minimum(gap, left), gap)
        limit = tl.maximum((tl.minimum(max_nodes, C) - count) // CHILDREN - tl.minimum(own_rows, 1), 0)
        limit = tl.where(own_rows < gap, 0, limit)
    else:
        end = tl.minimum(end, tl.load(allow_ptr + row))
        table_len = tl.load(table_len_ptr + row)
        own_rows = 1 + 0
        limit = tl.minimum(max_nodes, table_len - length)
        running = (state == _RUNNING) & (length < end) & (table_len >= length)
    # Bits of values are ordered as they are, but for -0.0.
    bits = value.to(tl.int32, bitcast=True)
    wanted = wanted & running & (length + depth < end) & (bits >= 0)
    limit = tl.minimum(limit, tl.sum(wanted.to(tl.int32)))
    if DRAFTS:
        running = running & ((own_rows > 0) | (limit > 0))
    limit, own_rows = tl.where(running, limit, -1), tl.where(running, own_rows, 0)
    tl.store(keys_ptr + entry, tl.where(wanted, bits, -1))
    tl.store(rank_ptr + entry, tl.full((C,), C, tl.int32))
    tl.debug_barrier()
    for begin in range(0, count, CHUNK):
        mine = begin + tl.arange(0, CHUNK)
        key = tl.load(keys_ptr + row * C + mine)
        rank = tl.zeros((CHUNK,), tl.int32)
        for other_begin in range(0, count, CHUNK):
            other = other_begin + tl.arange(0, CHUNK)
            other_key = tl.load(keys_ptr + row * C + other)
            before = (other_key[None, :] > key[:, None]) | (
                (other_key[None, :] == key[:, None]) & (other[None, :] < mine[:, None])
            )
            rank += tl.sum(before.to(tl.int32), 1)
        tl.store(rank_ptr + row * C + mine, rank, mask=key >= 0)
        tl.store(ordered_ptr + row * C + rank, key, mask=key >= 0)
    tl.store(own_rows_ptr + row, own_rows)
    tl.store(limit_ptr + row, limit)


@jit
def _fill(ordered_ptr, wanted, room, BLOCK_S: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr):
    """Return how many entries each row contributes to the `room` best, [BLOCK_S], and their gain.

    wanted: [BLOCK_S] int32, how many entries of each row count.
    """
    ordered = ordered_ptr + tl.arange(0, BLOCK_S)[:, None] * C + tl.arange(0, WIDTH)[None, :]
    column, widest = tl.arange(0, WIDTH)[None, :], tl.max(wanted)
    # More than `room` keys reach `low`, fewer reach `high`.
    low, high = -1, _ABOVE_ALL + 0
    if tl.sum(wanted) <= room:
        high = 0
    while high - low > 1:
        middle = low + (high - low) // 2
        reached = 0
        for begin in range(0, widest, WIDTH):
            key = tl.load(ordered + begin)
            reached += tl.sum(((key >= middle) & (column + begin < wanted[:, None])).to(tl.int32))
        if reached == room:
            # Nothing is left to share out among equals.
            low, high = middle - 1, middle
        elif reached > room:
            low = middle
        else:
            high = middle
    better, equal = tl.zeros_like(wanted), tl.zeros_like(wanted)
    gain = tl.zeros((), tl.int64)
    for begin in range(0, widest, WIDTH):
        key = tl.load(ordered + begin)
        key = tl.where(column + begin < wanted[:, None], key, -1)
        better += tl.sum((key >= high).to(tl.int32), 1)
        equal += tl.sum(((key == low) & (low >= 0)).to(tl.int32), 1)
        gain += tl.sum(tl.where(key >= high, _gain_of(key), 0))
    left = tl.maximum(room - tl.sum(better), 0)
    ties = tl.minimum(tl.maximum(left - (tl.cumsum(equal, 0) - equal), 0), equal)
    return better + ties, gain + tl.sum(ties).to(tl.int64) * _gain_of(low)


@jit
def _gain_of(key):
    # Of doubles, in which this is exact.
    value = tl.maximum(key, 0).to(tl.float32, bitcast=True).to(tl.float64)
    return (value * _SCALE + 0.5).to(tl.int64)


@jit(do_not_specialize=["launched"])
def _fill_kernel(
    buckets_ptr,  # [B, 4] int32
    reserved_sessions_ptr,  # [1] int32
    limit_ptr,  # [S] int32
    own_rows_ptr,  # [S] int32
    ordered_ptr,  # [S, C] int32
    needed_ptr,  # [1] int32
    num_selected_ptr,  # [S] int32
    first_row_ptr,  # [S] int32
    number_ptr,  # [S] int32
    totals_ptr,  # [2] int32
    gains_ptr,  # [B] int64
    turn_ptr,  # [1] int32
    free_head_ptr,  # [1] int64
    free_tail_ptr,  # [1] int64
    first_slot_ptr,  # [1] int64
    launched,
    S: tl.constexpr,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_S: tl.constexpr,
    DRAFTS: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    bucket = tl.program_id(0)
    row = tl.arange(0, BLOCK_S)
    here = row < S
    rows, places = tl.load(buckets_ptr + bucket * 4), tl.load(buckets_ptr + bucket * 4 + 1)
    most, most_entries = tl.load(buckets_ptr + bucket * 4 + 2), tl.load(buckets_ptr + bucket * 4 + 3)
    limit = tl.load(limit_ptr + row, mask=here, other=-1)
    own_rows = tl.load(own_rows_ptr + row, mask=here, other=0)
    if DRAFTS:
        free_head = tl.load(free_head_ptr)
        slots = tl.load(free_tail_ptr) - free_head
        rows = tl.minimum(rows.to(tl.int64), slots).to(tl.int32)
    places -= tl.load(reserved_sessions_ptr)
    needed = tl.sum(own_rows)
    fits = (tl.sum((limit >= 0).to(tl.int32)) <= places) & (needed <= rows) & (tl.max(own_rows) <= most)
    could = (limit >= 0) & (own_rows <= tl.minimum(most, rows))
    counts, needs = could.to(tl.int32), tl.where(could, own_rows, 0)
    takes_part = could
    if (fits == 0) & (bucket == launched):
        # From `turn` on, by sums over the rows in that order; the first that does not fit begins the next time.
        first = tl.load(turn_ptr)
        step = tl.where(row >= first, row - first, row - first + S)
        counts_until = tl.cumsum(counts, 0) - tl.sum(tl.where(row < first, counts, 0))
        needs_until = tl.cumsum(needs, 0) - tl.sum(tl.where(row < first, needs, 0))
        counts_until += tl.where(row >= first, 0, tl.sum(counts))
        needs_until += tl.where(row >= first, 0, tl.sum(needs))
        late = could & ((counts_until > places) | (needs_until > rows))
        begins = tl.min(tl.where(late, step, S))
        takes_part = could & (step < begins)
        if begins < S:
            tl.store(turn_ptr, (first + begins) % S)
    if (fits == 0) & (bucket != launched):
        tl.store(gains_ptr + bucket, tl.full((), -1, tl.int64))
    else:
        needs = tl.where(takes_part, own_rows, 0)
        room = tl.minimum(rows - tl.sum(needs), most_entries)
        wanted = tl.minimum(limit, most - own_rows)
        wanted = tl.where(takes_part, tl.maximum(wanted, 0), 0)
        taken, gain = _fill(ordered_ptr, wanted, room, BLOCK_S, C, WIDTH)
        tl.store(gains_ptr + bucket, tl.where(fits, gain, -1))
        if bucket == launched:
            size = needs + tl.where(takes_part, taken, 0)
            is_there = (size > 0).to(tl.int32)
            tl.store(num_selected_ptr + row, tl.where(takes_part, taken, -1), mask=here)
            tl.store(first_row_ptr + row, tl.cumsum(size, 0) - size, mask=here)
            tl.store(number_ptr + row, tl.cumsum(is_there, 0) - is_there, mask=here)
            tl.store(needed_ptr, needed)
            tl.store(totals_ptr, tl.sum(size))
            tl.store(totals_ptr + 1, tl.sum(is_there))
            if DRAFTS:
                tl.store(first_slot_ptr, free_head)
