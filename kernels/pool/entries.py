"""Row-level steps shared by the pool's operators: find, revalue and keep entries, release their KV slots.

For each a compiled loop and a Triton function; shapes as in `outrider.kernels.pool.columns`. In the Triton functions a
column of entries is a tensor [C] in registers, so that one program handles one row.
"""

# compile-time parameters of kernels are upper case
# ruff: noqa: N803

from __future__ import annotations

from typing import Any

import numpy as np

from outrider.kernels.backend import jit, tl, triton
from outrider.kernels.compiled import compiled
from outrider.kernels.early_launch import early_options
from outrider.kernels.pool.columns import Pool

__all__ = [
    "find_child",
    "free_released",
    "is_stop",
    "keep_entries",
    "launch_free_released",
    "release",
    "release_cached",
    "release_slots",
    "revalue",
    "revalue_entries",
    "store_entries",
]

_ONE = np.float32(1.0)
# Slots of a table that the kernel moves at a time.
_TABLE_SLOTS = 1024


# Passing arrays costs time: a function called once a node gets single rows, not the pool.
@compiled
def find_child(parents: Any, tokens: Any, count: int, parent: int, token: int) -> int:
    """Return the entry with this parent and token among a row's first `count`, -1 if there is none."""
    for entry in range(max(parent + 1, 0), count):
        if parents[entry] == parent and tokens[entry] == token:
            return entry
    return -1


@compiled
def is_stop(stops: Any, min_end: int, token: int, index: int) -> bool:
    """Return whether a token ends the session if it is chosen at this index."""
    if index < min_end:
        return False
    for stop in stops:
        if stop < 0:
            return False
        if stop == token:
            return True
    return False


@compiled
def revalue(pool: Any, row: int) -> None:
    """Recompute the values of a row's entries."""
    for entry in range(pool.count[row]):
        parent = pool.parent[row, entry]
        above = _ONE if parent < 0 else pool.value[row, parent]
        pool.value[row, entry] = above * pool.acceptance[row, entry]


@compiled
def keep_entries(pool: Any, row: int, keep: Any) -> None:
    """Drop the entries of a row for which `keep` [C] is false and release their slots.

    The parent of an entry that stays must stay, or be -1.
    """
    count, kept = pool.count[row], 0
    has_slots = len(pool.slot) > 0
    moved = np.empty(count, np.int32)
    for entry in range(count):
        if not keep[entry]:
            moved[entry] = -1
            if has_slots and pool.expanded[row, entry]:
                pool.released[row, pool.released_count[row]] = pool.slot[row, entry]
                pool.released_count[row] += 1
            continue
        parent = pool.parent[row, entry]
        moved[entry] = kept
        pool.token[row, kept] = pool.token[row, entry]
        pool.parent[row, kept] = -1 if parent < 0 else moved[parent]
        pool.depth[row, kept] = pool.depth[row, entry]
        pool.acceptance[row, kept] = pool.acceptance[row, entry]
        pool.value[row, kept] = pool.value[row, entry]
        for place in range(pool.ids.shape[2]):
            pool.ids[row, kept, place] = pool.ids[row, entry, place]
        pool.drafters[row, kept] = pool.drafters[row, entry]
        pool.stopped[row, kept] = pool.stopped[row, entry]
        if has_slots:
            pool.slot[row, kept] = pool.slot[row, entry]
            pool.expanded[row, kept] = pool.expanded[row, entry]
        kept += 1
    pool.count[row] = kept


@compiled
def release(pool: Any, row: int) -> None:
    """Release the KV slots of all entries of a row."""
    for entry in range(pool.count[row]):
        if pool.expanded[row, entry]:
            pool.released[row, pool.released_count[row]] = pool.slot[row, entry]
            pool.released_count[row] += 1
        pool.expanded[row, entry] = False
        pool.slot[row, entry] = -1


@compiled
def release_cached(pool: Any, row: int) -> None:
    """Release the KV slots of a row's committed tokens."""
    pool.released_cached[row] += pool.cached[row]
    pool.cached[row] = 0


@compiled
def free_released(pool: Any) -> None:
    """Append what was released to the queue of free slots, rows in order, slots of entries before those of a table."""
    places = len(pool.free) - 1
    for row in range(len(pool.released_count)):
        for number in range(pool.released_count[row]):
            pool.free[pool.free_tail[0] & places] = pool.released[row, number]
            pool.free_tail[0] += 1
        for index in range(pool.released_cached[row]):
            pool.free[pool.free_tail[0] & places] = pool.table[row, index]
            pool.free_tail[0] += 1
        pool.released_count[row] = pool.released_cached[row] = 0


@jit
def revalue_entries(value, acceptance, parent, live):
    """Return values [C]: rounds of value = parent's value * acceptance, until nothing changes."""
    changed = 1
    while changed > 0:
        above = tl.gather(value, tl.maximum(parent, 0), 0)
        renewed = tl.where(live, tl.where(parent < 0, 1.0, above) * acceptance, value)
        # Compare bits: NaN differs from itself and would never end the loop.
        changed = tl.max((renewed.to(tl.int32, bitcast=True) != value.to(tl.int32, bitcast=True)).to(tl.int32))
        value = renewed
    return value


@jit
def store_entries(
    entry,  # [C] int32, where to
    mask,  # [C]
    token,
    parent,
    depth,
    acceptance,
    value,
    ids,  # [C, D]
    drafters,
    stopped,
    token_ptr,
    parent_ptr,
    depth_ptr,
    acceptance_ptr,
    value_ptr,
    ids_ptr,
    drafters_ptr,
    stopped_ptr,
    D: tl.constexpr,
):
    """Write entries [C] from registers, each to its place."""
    tl.store(token_ptr + entry, token, mask=mask)
    tl.store(parent_ptr + entry, parent, mask=mask)
    tl.store(depth_ptr + entry, depth, mask=mask)
    tl.store(acceptance_ptr + entry, acceptance, mask=mask)
    tl.store(value_ptr + entry, value, mask=mask)
    tl.store(drafters_ptr + entry, drafters, mask=mask)
    tl.store(stopped_ptr + entry, stopped, mask=mask)
    tl.store(ids_ptr + entry[:, None] * D + tl.arange(0, D)[None, :], ids, mask=mask[:, None])


@jit
def release_slots(slot, gone, released_ptr, released_count):
    """Note the slots of entries [C], in index order, behind those noted before; return how many there are now."""
    gone = gone.to(tl.int32)
    number = released_count + tl.cumsum(gone, 0) - gone
    tl.store(released_ptr + number, slot, mask=gone > 0)
    return released_count + tl.sum(gone)


def launch_free_released(pool: Pool) -> None:
    """`free_released` on a GPU."""
    nodes = pool.nodes
    assert nodes is not None
    _free_released_kernel[(1,)](
        nodes.released,
        nodes.released_count,
        nodes.released_cached,
        pool.table,
        nodes.free,
        nodes.free_tail,
        pool.table.shape[1],
        nodes.free.shape[0],
        S=pool.sessions,
        C=pool.capacity,
        BLOCK_S=min(triton.next_power_of_2(pool.sessions), 64),
        BLOCK_C=min(pool.capacity, 64),
        BLOCK_T=_TABLE_SLOTS,
        num_warps=8,
        **early_options(pool.device),
    )


@jit(do_not_specialize=["table_width", "num_slots"])
def _free_released_kernel(
    released_ptr,  # [S, C] int32
    released_count_ptr,  # [S] int32
    released_cached_ptr,  # [S] int32
    table_ptr,  # [S, table_width] int32
    free_ptr,  # [num_slots] int32
    free_tail_ptr,  # [1] int64
    table_width,
    num_slots,
    S: tl.constexpr,
    C: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_T: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    tail = tl.load(free_tail_ptr)
    for begin in range(0, S, BLOCK_S):
        row = begin + tl.arange(0, BLOCK_S)
        count = tl.load(released_count_ptr + row, mask=row < S, other=0)
        cached = tl.load(released_cached_ptr + row, mask=row < S, other=0)
        first = tail + tl.cumsum(count + cached, 0) - (count + cached)
        for left in range(0, tl.max(count), BLOCK_C):
            column = left + tl.arange(0, BLOCK_C)
            mask = column[None, :] < count[:, None]
            slot = tl.load(released_ptr + row[:, None] * C + column[None, :], mask=mask)
            tl.store(free_ptr + ((first[:, None] + column[None, :]) & (num_slots - 1)), slot, mask=mask)
        # Few rows end at once, and each has many slots.
        pending = tl.where(cached > 0, row, S)
        ended = tl.min(pending)
        while ended < S:
            behind = tl.sum(tl.where(row == ended, first + count, 0))
            length = tl.sum(tl.where(row == ended, cached, 0))
            table = table_ptr + ended.to(tl.int64) * table_width
            for left in range(0, length, BLOCK_T):
                index = left + tl.arange(0, BLOCK_T)
                slot = tl.load(table + index, mask=index < length)
                tl.store(free_ptr + ((behind + index) & (num_slots - 1)), slot, mask=index < length)
            pending = tl.where(row == ended, S, pending)
            ended = tl.min(pending)
        tl.store(released_count_ptr + row, tl.zeros_like(count), mask=row < S)
        tl.store(released_cached_ptr + row, tl.zeros_like(cached), mask=row < S)
        tail += tl.sum(count + cached)
    tl.store(free_tail_ptr, tail)
