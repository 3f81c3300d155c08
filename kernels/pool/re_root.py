"""Committed tokens leave a row: the root moves along them, what hangs below the new root stays, the rest goes.

From the root, each committed token leads to the child with that token, as far as there is one. The history takes the
tokens; the trail takes the ids of the entries walked, 0 behind the last of them. What hangs below the entry of the last
token stays, in order, with its depth and its value counted from the new root. A walk that left the tree leaves the row
empty.

`cached` follows: in a target's pool the forward pass that chose the tokens has stored all but the last one, so a row
whose root alone had no KV (cached = length - 1) stays such a row. In the pool of a drafter that computes here, a row
whose root has KV (cached = length) goes on over the walked entries up to the first that is not expanded; their slots
enter the table, all other slots of entries that go are freed in index order. A drafter that reads the target's hidden
states computes what is committed once more, from these: in its pool (`regrows`) no walked entry counts as cached, and
nothing stays below the new root.

Where the walk ends says what growth was worth, a `TreeEnd`: the last token was an entry, or other entries stood in its
place, or none did.

Shapes: M tokens of a row at most, and as in `columns.py`.
"""

# compile-time parameters of kernels are upper case; a kernel is one function
# ruff: noqa: N803, PLR0912, PLR0915

from __future__ import annotations

import enum
from typing import Any

import numpy as np
import torch

from outrider.kernels.argument_checks import check_dtype, check_place
from outrider.kernels.backend import check_shape, jit, tl, triton, uses_triton
from outrider.kernels.compiled import compiled
from outrider.kernels.early_launch import early_options
from outrider.kernels.pool.columns import Pool, PoolArrays
from outrider.kernels.pool.entries import (
    find_child,
    free_released,
    keep_entries,
    launch_free_released,
    release_slots,
    store_entries,
)

__all__ = ["TreeEnd", "re_root", "re_root_reference"]


class TreeEnd(enum.IntEnum):
    """State of a row's tree after commits."""

    NONE = 0
    """Nothing was committed."""
    COVERED = 1
    """The last token was an entry."""
    MISSED = 2
    """Entries stood in the place of a token that is none of them."""
    STARVED = 3
    """Nothing stood in the place of a token."""


_INT32 = (torch.int32,)
_ONE = np.float32(1.0)
_NO_ENDS = np.empty(0, np.int32)
_COVERED, _MISSED = tl.constexpr(int(TreeEnd.COVERED)), tl.constexpr(int(TreeEnd.MISSED))
_STARVED = tl.constexpr(int(TreeEnd.STARVED))
# Pointers that the kernel must not assume to be aligned. If Triton knows the alignment it loads four entries a thread,
# and scattering them costs a pass through shared memory per column.
_SCATTERED = [
    "token_ptr",
    "parent_ptr",
    "depth_ptr",
    "acceptance_ptr",
    "drafters_ptr",
    "stopped_ptr",
    "slot_ptr",
    "expanded_ptr",
]


def re_root(
    pool: Pool,
    tokens: torch.Tensor,
    num_tokens: torch.Tensor,
    tree_ends: torch.Tensor | None = None,
    *,
    regrows: bool = False,
) -> None:
    """Commit tokens to every row that has some.

    Args:
        pool: changed.
        tokens: [S, M] int32, the tokens committed to each row, in order.
        num_tokens: [S] int32, how many of them; 0 leaves the row as it is. What would exceed the history is left out.
        tree_ends: [S] int32, written: a `TreeEnd` of each row.
        regrows: whether the tree of a row is grown anew from its committed tokens, in a drafter's pool.

    Raises:
        ValueError: a shape, dtype or device that does not fit, naming the argument.
    """
    check_shape("tokens", tokens, (pool.sessions, tokens.shape[-1]))
    check_shape("num_tokens", num_tokens, (pool.sessions,))
    given = {"tokens": tokens, "num_tokens": num_tokens}
    if tree_ends is not None:
        check_shape("tree_ends", tree_ends, (pool.sessions,))
        given["tree_ends"] = tree_ends
    for name, tensor in given.items():
        check_dtype(name, tensor, _INT32)
        check_place(name, tensor, pool.device, "pool")
    if uses_triton(tokens):
        _launch(pool, tokens, num_tokens, tree_ends, regrows=regrows)
    else:
        re_root_reference(pool, tokens, num_tokens, tree_ends, regrows=regrows)


def re_root_reference(
    pool: Pool,
    tokens: torch.Tensor,
    num_tokens: torch.Tensor,
    tree_ends: torch.Tensor | None = None,
    *,
    regrows: bool = False,
) -> None:
    """`re_root` on a CPU, one row after the other."""
    ends = _NO_ENDS if tree_ends is None else tree_ends.numpy()
    _re_root(pool.arrays, tokens.numpy(), num_tokens.numpy(), ends, regrows)


@compiled
def _re_root(arrays: Any, tokens: Any, num_tokens: Any, tree_ends: Any, regrows: bool) -> None:
    pool = PoolArrays(*arrays)
    trail, places, has_slots = pool.root_ids.shape[1], pool.ids.shape[2], len(pool.slot) > 0
    keep = np.empty(pool.token.shape[1], np.bool_)
    for row in range(len(num_tokens)):
        length = pool.length[row]
        committed = min(num_tokens[row], tokens.shape[1], pool.history.shape[1] - length)
        if len(tree_ends) > 0:
            tree_ends[row] = TreeEnd.NONE if committed < 1 else TreeEnd.COVERED
        if committed < 1:
            continue
        was_cached = pool.cached[row]
        entry, is_walking = -1, True
        for number in range(committed):
            index, token = length + number, tokens[row, number]
            pool.history[row, index] = token
            if is_walking:
                above = entry
                entry = find_child(pool.parent[row], pool.token[row], pool.count[row], entry, token)
                is_walking = entry >= 0
                if not is_walking and len(tree_ends) > 0:
                    tree_ends[row] = TreeEnd.STARVED
                    for other in range(pool.count[row]):
                        if pool.parent[row, other] == above:
                            tree_ends[row] = TreeEnd.MISSED
            for place in range(places):
                pool.root_ids[row, index % trail, place] = pool.ids[row, entry, place] if is_walking else 0
            enters = has_slots and is_walking and not regrows
            if enters and pool.cached[row] == index and pool.expanded[row, entry]:
                pool.table[row, index] = pool.slot[row, entry]
                pool.expanded[row, entry] = False
                pool.cached[row] += 1
        pool.length[row] = length + committed
        if not has_slots and was_cached == length - 1:
            pool.cached[row] = length + committed - 1
        for other in range(pool.count[row]):
            parent = pool.parent[row, other]
            keep[other] = is_walking and not regrows and (parent == entry or (parent >= 0 and keep[parent]))
            if keep[other]:
                pool.depth[row, other] -= committed
                pool.parent[row, other] = -1 if parent == entry else parent
                value_above = _ONE if parent == entry else pool.value[row, parent]
                pool.value[row, other] = value_above * pool.acceptance[row, other]
        keep_entries(pool, row, keep)
    free_released(pool)


def _launch(
    pool: Pool, tokens: torch.Tensor, num_tokens: torch.Tensor, tree_ends: torch.Tensor | None, *, regrows: bool
) -> None:
    nodes, none = pool.nodes, pool.count
    _re_root_kernel[(pool.sessions,)](
        tokens.contiguous(),
        num_tokens.contiguous(),
        pool.count,
        pool.token,
        pool.parent,
        pool.depth,
        pool.acceptance,
        pool.value,
        pool.ids,
        pool.drafters,
        pool.stopped,
        pool.length,
        pool.cached,
        pool.history,
        pool.root_ids,
        pool.table,
        none if nodes is None else nodes.slot,
        none if nodes is None else nodes.expanded,
        none if nodes is None else nodes.released,
        none if nodes is None else nodes.released_count,
        none if tree_ends is None else tree_ends,
        tokens.shape[1],
        pool.max_len,
        pool.table.shape[1],
        C=pool.capacity,
        D=pool.places,
        T=pool.trail,
        BLOCK_M=triton.next_power_of_2(tokens.shape[1]),
        HAS_SLOTS=nodes is not None,
        HAS_ENDS=tree_ends is not None,
        REGROWS=regrows,
        num_warps=4,
        **early_options(pool.device),
    )
    if nodes is not None:
        launch_free_released(pool)


@jit(do_not_specialize=["most", "max_len", "table_width"], do_not_specialize_on_alignment=_SCATTERED)
def _re_root_kernel(
    tokens_ptr,  # [S, M] int32
    num_tokens_ptr,  # [S] int32
    count_ptr,  # [S] int32
    token_ptr,  # [S, C] int32
    parent_ptr,  # [S, C] int32
    depth_ptr,  # [S, C] int32
    acceptance_ptr,  # [S, C] float32
    value_ptr,  # [S, C] float32
    ids_ptr,  # [S, C, D] int32
    drafters_ptr,  # [S, C] int8
    stopped_ptr,  # [S, C] bool
    length_ptr,  # [S] int32
    cached_ptr,  # [S] int32
    history_ptr,  # [S, max_len] int32
    root_ids_ptr,  # [S, T, D] int32
    table_ptr,  # [S, table_width] int32
    slot_ptr,  # [S, C] int32
    expanded_ptr,  # [S, C] bool
    released_ptr,  # [S, C] int32
    released_count_ptr,  # [S] int32
    tree_ends_ptr,  # [S] int32
    most,
    max_len,
    table_width,
    C: tl.constexpr,
    D: tl.constexpr,
    T: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    HAS_ENDS: tl.constexpr,
    REGROWS: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    index, places, numbers = tl.arange(0, C), tl.arange(0, D), tl.arange(0, BLOCK_M)
    entry, entry_ids = row * C + index, (row * C + index[:, None]) * D + places[None, :]
    # All of the row, whether it has tokens or not: the loads need not wait for each other.
    length, count, cached = tl.load(length_ptr + row), tl.load(count_ptr + row), tl.load(cached_ptr + row)
    committed = tl.minimum(tl.minimum(tl.load(num_tokens_ptr + row), most), max_len - length)
    committed_tokens = tl.load(tokens_ptr + row * most + numbers, mask=numbers < most)
    token, parent = tl.load(token_ptr + entry), tl.load(parent_ptr + entry)
    depth, acceptance = tl.load(depth_ptr + entry), tl.load(acceptance_ptr + entry)
    drafters, stopped = tl.load(drafters_ptr + entry), tl.load(stopped_ptr + entry)
    ids = tl.load(ids_ptr + entry_ids)
    if HAS_SLOTS:
        slot, expanded = tl.load(slot_ptr + entry), tl.load(expanded_ptr + entry)
    tree_end = 0
    if committed > 0:
        live = index < count
        if HAS_SLOTS:
            expanded = expanded & live
        history = history_ptr + row.to(tl.int64) * max_len
        tl.store(history + length + numbers, committed_tokens, mask=numbers < committed)

        # The walk: along entries of depth 1, 2, .. whose parent is the one walked last.
        walked, last, is_walking = tl.zeros((C,), tl.int1), -1, 1
        tree_end = _COVERED + 0
        for number in range(committed):
            if is_walking > 0:
                below = live & (parent == last)
                here = below & (token == tl.load(tokens_ptr + row * most + number))
                step = tl.max(tl.where(here, index, -1))
                walked |= here
                last = step
                is_walking = (step >= 0).to(tl.int32)
                if HAS_ENDS and is_walking == 0:
                    tree_end = tl.where(tl.sum(below.to(tl.int32)) > 0, _MISSED, _STARVED)

        first_new = tl.maximum(length, length + committed - T)
        behind = tl.arange(0, T)
        trail_index = first_new + behind
        new = trail_index < length + committed
        trail_ids = (row * T + (trail_index & (T - 1))[:, None]) * D + places[None, :]
        tl.store(root_ids_ptr + trail_ids, tl.zeros((T, D), tl.int32), mask=new[:, None] & (places >= 0)[None, :])
        tl.debug_barrier()
        token_index = length - 1 + depth
        walked_ids = (row * T + (token_index & (T - 1))[:, None]) * D + places[None, :]
        tl.store(root_ids_ptr + walked_ids, ids, mask=(walked & (token_index >= first_new))[:, None])

        if HAS_SLOTS:
            # Ancestors are expanded before what hangs below them: the expanded part of the walk is its beginning.
            enters = walked & expanded & (cached == length)
            if REGROWS:
                # None of them.
                enters = enters & (index < 0)
            table = table_ptr + row.to(tl.int64) * table_width
            tl.store(table + token_index, slot, mask=enters)
            cached += tl.sum(enters.to(tl.int32))
        elif cached == length - 1:
            cached = length + committed - 1

        # Values from the new root downwards, a level at a time; -1 where that has not come yet, or never will.
        value = tl.full((C,), -1.0, tl.float32)
        levels = tl.max(tl.where(live, depth, 0)) - committed
        for _ in range(tl.where(is_walking > 0, levels, 0)):
            above = tl.gather(value, tl.maximum(parent, 0), 0)
            above = tl.where(parent == last, 1.0, tl.where(parent < 0, -1.0, above))
            value = tl.where(live & (above >= 0), above * acceptance, value)
        keep = value >= 0
        if REGROWS:
            # None of them.
            keep = keep & (index < 0)
        if HAS_SLOTS:
            gone = expanded & (keep == 0) & (enters == 0)
            tl.store(released_count_ptr + row, release_slots(slot, gone, released_ptr + row * C, 0))
        moved = tl.cumsum(keep.to(tl.int32), 0) - 1
        parent = tl.where(parent == last, -1, tl.gather(moved, tl.maximum(parent, 0), 0))
        # All of the row is in registers before its first entry is overwritten.
        tl.debug_barrier()
        store_entries(
            row * C + moved, keep, token, parent, depth - committed, acceptance, value, ids, drafters, stopped,
            token_ptr, parent_ptr, depth_ptr, acceptance_ptr, value_ptr, ids_ptr, drafters_ptr, stopped_ptr, D,
        )  # fmt: skip
        if HAS_SLOTS:
            tl.store(slot_ptr + row * C + moved, slot, mask=keep)
            tl.store(expanded_ptr + row * C + moved, expanded, mask=keep)
        tl.store(count_ptr + row, tl.sum(keep.to(tl.int32)))
        tl.store(length_ptr + row, length + committed)
        tl.store(cached_ptr + row, cached)
    if HAS_ENDS:
        tl.store(tree_ends_ptr + row, tree_end)
