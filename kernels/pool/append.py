"""Append the children that the local drafter proposes.

An entry that was expanded in the step, and that only others had proposed, gets an id of this drafter's place first: it
has KV here, and what hangs below it must have only ancestors with such an id. Then each row that has logits (the root,
or an expanded entry) brings some children, distinct tokens. They are taken in order, row after row. A child that its
parent has already takes the larger acceptance, and a new id if the place has none for it; any other one is appended
with a new id; one that finds no room is dropped, and the place has `lost` growth. Ids come from the row's counter
(`NodeSlots.next_id`).

Shapes: R rows of the step, K children of a row at most, and as in `columns.py`.
"""

# compile-time parameters of kernels are upper case; a kernel is one function
# ruff: noqa: N803, PLR0912, PLR0915

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from outrider.kernels.argument_checks import check_dtype, check_place
from outrider.kernels.backend import check_shape, jit, tl, triton, uses_triton
from outrider.kernels.compiled import compiled
from outrider.kernels.early_launch import early_options
from outrider.kernels.pool.columns import MAX_STOPS, Pool, PoolArrays
from outrider.kernels.pool.entries import find_child, is_stop, revalue, revalue_entries
from outrider.kernels.pool.pack import ROOT, Packed, PackedArrays

__all__ = ["append", "append_reference"]

_ROOT, _STOPS = tl.constexpr(ROOT), tl.constexpr(MAX_STOPS)
# New children that a program looks up at a time.
_NEW = 64


def append(
    pool: Pool,
    packed: Packed,
    tokens: torch.Tensor,
    acceptances: torch.Tensor,
    made: torch.Tensor,
    parent_ids: torch.Tensor,
    *,
    place: int = 0,
    drafter: int = 0,
) -> None:
    """Append the children of a step's rows, and report what they are called.

    Args:
        pool: changed; one whose drafter computes here.
        packed: the step, as `pack` wrote it.
        tokens: [R, K] int32, distinct within a row; -1 for no child. Padding and committed tokens have none, whatever
            stands there.
        acceptances: [R, K] float32, in [0, 1].
        made: [R, K] int32, written: the id of each child that was appended, 0 for every other one.
        parent_ids: [R] int32, written: the id of the row's entry; 0 for the root, -1 for committed tokens and padding.
        place: whose ids they get.
        drafter: number of the drafter's kind, 0 to 7.

    Raises:
        ValueError: a shape, dtype, device or number that does not fit, naming the argument.
    """
    rows = packed.tokens.shape[0]
    check_shape("tokens", tokens, (rows, tokens.shape[-1]))
    check_shape("acceptances", acceptances, (rows, tokens.shape[-1]))
    check_dtype("acceptances", acceptances, (torch.float32,))
    check_place("acceptances", acceptances, pool.device, "pool")
    check_shape("made", made, (rows, tokens.shape[-1]))
    check_shape("parent_ids", parent_ids, (rows,))
    for name, tensor in (("tokens", tokens), ("made", made), ("parent_ids", parent_ids)):
        check_dtype(name, tensor, (torch.int32,))
        check_place(name, tensor, pool.device, "pool")
    for name, tensor in (("made", made), ("parent_ids", parent_ids)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: strides {tensor.stride()} given, a contiguous tensor needed")
    if pool.nodes is None:
        raise ValueError("pool: one without NodeSlots given, that of a drafter needed")
    if not 0 <= place < pool.places:
        raise ValueError(f"place: {place} given, one of {pool.places} needed")
    if not 0 <= drafter < 8:
        raise ValueError(f"drafter: {drafter} given, 0 to 7 needed")
    # A byte with a sign, as the column has it.
    bit = ((1 << drafter) ^ 0x80) - 0x80
    if uses_triton(tokens):
        _launch(pool, packed, tokens.contiguous(), acceptances.contiguous(), made, parent_ids, place, bit)
    else:
        append_reference(pool, packed, tokens, acceptances, made, parent_ids, place, bit)


def append_reference(
    pool: Pool,
    packed: Packed,
    tokens: torch.Tensor,
    acceptances: torch.Tensor,
    made: torch.Tensor,
    parent_ids: torch.Tensor,
    place: int,
    bit: int,
) -> None:
    """`append` on a CPU, one child after the other; `bit` is the drafter's of `Pool.drafters`."""
    _append(
        pool.arrays,
        packed.arrays,
        tokens.numpy(),
        acceptances.numpy(),
        made.numpy(),
        parent_ids.numpy(),
        place,
        bit,
    )


@compiled
def _append(
    pool_arrays: Any,
    arrays: Any,
    tokens: Any,
    acceptances: Any,
    made: Any,
    parent_ids: Any,
    place: int,
    drafter: int,
) -> None:
    pool, packed = PoolArrays(*pool_arrays), PackedArrays(*arrays)
    entries, pool_rows, query_start = packed.entries, packed.pool_rows, packed.query_start
    made[:], parent_ids[:] = 0, -1
    for session in range(len(pool_rows)):
        row = pool_rows[session]
        if row < 0:
            continue
        merged, old = False, pool.count[row]
        for at in range(query_start[session], query_start[session + 1]):
            if entries[at] >= 0 and pool.ids[row, entries[at], place] == 0:
                pool.ids[row, entries[at], place] = pool.next_id[row]
                pool.next_id[row] += 1
        for at in range(query_start[session], query_start[session + 1]):
            parent = entries[at]
            if parent < ROOT:
                continue
            parent_ids[at] = pool.ids[row, parent, place] if parent >= 0 else 0
            depth, value, stopped, has_children = 1, np.float32(1.0), False, False
            if parent >= 0:
                depth, value, stopped = (
                    pool.depth[row, parent] + 1,
                    pool.value[row, parent],
                    pool.stopped[row, parent],
                )
            for entry in range(max(parent + 1, 0), old):
                has_children |= pool.parent[row, entry] == parent
            for number in range(tokens.shape[1]):
                token, acceptance = tokens[at, number], acceptances[at, number]
                if token < 0:
                    continue
                if has_children:
                    entry = find_child(pool.parent[row], pool.token[row], old, parent, token)
                    if entry >= 0:
                        if pool.ids[row, entry, place] == 0:
                            pool.ids[row, entry, place] = pool.next_id[row]
                            pool.next_id[row] += 1
                        pool.acceptance[row, entry] = max(pool.acceptance[row, entry], acceptance)
                        pool.drafters[row, entry] |= drafter
                        merged = True
                        continue
                count = pool.count[row]
                if count == pool.token.shape[1]:
                    pool.lost[row, place] = True
                    continue
                pool.token[row, count], pool.parent[row, count], pool.depth[row, count] = token, parent, depth
                pool.acceptance[row, count], pool.value[row, count] = acceptance, value * acceptance
                for other in range(pool.ids.shape[2]):
                    pool.ids[row, count, other] = 0
                pool.ids[row, count, place] = made[at, number] = pool.next_id[row]
                pool.next_id[row] += 1
                pool.drafters[row, count] = drafter
                ends = is_stop(pool.stops[row], pool.min_end[row], token, pool.length[row] - 1 + depth)
                pool.stopped[row, count] = stopped or ends
                pool.slot[row, count], pool.expanded[row, count] = -1, False
                pool.count[row] = count + 1
        if merged:
            revalue(pool, row)


def _launch(
    pool: Pool,
    packed: Packed,
    tokens: torch.Tensor,
    acceptances: torch.Tensor,
    made: torch.Tensor,
    parent_ids: torch.Tensor,
    place: int,
    drafter: int,
) -> None:
    nodes = pool.nodes
    assert nodes is not None
    children = triton.next_power_of_2(tokens.shape[1])
    _append_kernel[(packed.pool_rows.shape[0],)](
        packed.entries,
        packed.pool_rows,
        packed.query_start,
        tokens,
        acceptances,
        made,
        parent_ids,
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
        pool.lost,
        pool.stops,
        pool.min_end,
        nodes.slot,
        nodes.expanded,
        nodes.next_id,
        tokens.shape[0],
        tokens.shape[1],
        place,
        drafter,
        C=pool.capacity,
        D=pool.places,
        K=children,
        ROWS=max(_NEW // children, 1),
        num_warps=4,
        **early_options(pool.device),
    )


@jit(do_not_specialize=["rows", "children", "place", "drafter"])
def _append_kernel(
    entries_ptr,  # [R] int32
    pool_rows_ptr,  # [N] int32
    query_start_ptr,  # [N + 1] int32
    tokens_ptr,  # [R, children] int32
    acceptances_ptr,  # [R, children] float32
    made_ptr,  # [R, children] int32
    parent_ids_ptr,  # [R] int32
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
    lost_ptr,  # [S, D] bool
    stops_ptr,  # [S, 64] int32
    min_end_ptr,  # [S] int32
    slot_ptr,  # [S, C] int32
    expanded_ptr,  # [S, C] bool
    next_id_ptr,  # [S] int32
    rows,
    children,
    place,
    drafter,
    C: tl.constexpr,
    D: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    session, sessions = tl.program_id(0), tl.num_programs(0)
    row = tl.load(pool_rows_ptr + session)
    new = tl.arange(0, ROWS * K)
    # Padding of the bucket, shared between all programs.
    for first in range(tl.load(query_start_ptr + sessions) + session * ROWS, rows, sessions * ROWS):
        at, child = first + new // K, new % K
        tl.store(made_ptr + at * children + child, tl.zeros_like(new), mask=(at < rows) & (child < children))
        tl.store(parent_ids_ptr + at, tl.full((ROWS * K,), -1, tl.int32), mask=(at < rows) & (child == 0))
    if row >= 0:
        begin, end = tl.load(query_start_ptr + session), tl.load(query_start_ptr + session + 1)
        index, places = tl.arange(0, C), tl.arange(0, D)
        entry = row * C + index
        count, next_id, length = tl.load(count_ptr + row), tl.load(next_id_ptr + row), tl.load(length_ptr + row)
        old = index < count
        token, parent = tl.load(token_ptr + entry), tl.load(parent_ptr + entry)
        live_count, is_full = count, 0
        for first in range(begin, end, C):
            own = tl.load(entries_ptr + first + index, mask=first + index < end, other=_ROOT)
            its_id = ids_ptr + (row * C + own) * D + place
            known_id = tl.load(its_id, mask=own >= 0, other=tl.where(own == _ROOT, 0, -1))
            lacks = ((own >= 0) & (known_id == 0)).to(tl.int32)
            new_id = next_id + tl.cumsum(lacks, 0) - 1
            tl.store(its_id, new_id, mask=lacks > 0)
            tl.store(parent_ids_ptr + first + index, tl.where(lacks > 0, new_id, known_id), mask=first + index < end)
            next_id += tl.sum(lacks)
        tl.debug_barrier()
        merged = 0
        num_stops = tl.sum((tl.load(stops_ptr + row * _STOPS + tl.arange(0, _STOPS)) >= 0).to(tl.int32))
        min_end = tl.load(min_end_ptr + row)
        for first in range(begin, end, ROWS):
            at, child = first + new // K, new % K
            above = tl.load(entries_ptr + at, mask=at < end, other=_ROOT - 1)
            is_place = (at < end) & (child < children)
            wanted = is_place & (above >= _ROOT)
            new_token = tl.load(tokens_ptr + at * children + child, mask=wanted, other=-1)
            offered = tl.load(acceptances_ptr + at * children + child, mask=wanted, other=0.0)
            wanted = wanted & (new_token >= 0)
            same = old[None, :] & (parent[None, :] == above[:, None]) & (token[None, :] == new_token[:, None])
            there = tl.max(tl.where(same & wanted[:, None], index[None, :], -1), 1)
            fresh, known = wanted & (there < 0), wanted & (there >= 0)
            to = live_count + tl.cumsum(fresh.to(tl.int32), 0) - 1
            fits = fresh & (to < C)
            known_entry, to = row * C + there, row * C + to
            its_id = ids_ptr + known_entry * D + place
            adopted = known & (tl.load(its_id, mask=known, other=1) == 0)
            gets_id = (fits | adopted).to(tl.int32)
            node_id = next_id + tl.cumsum(gets_id, 0) - gets_id
            tl.store(its_id, node_id, mask=adopted)
            tl.store(made_ptr + at * children + child, tl.where(fits, node_id, 0), mask=is_place)
            acceptance = tl.load(acceptance_ptr + known_entry, mask=known, other=0.0)
            tl.store(acceptance_ptr + known_entry, tl.maximum(acceptance, offered), mask=known)
            kinds = tl.load(drafters_ptr + known_entry, mask=known, other=0)
            tl.store(drafters_ptr + known_entry, (kinds.to(tl.int32) | drafter).to(tl.int8), mask=known)

            # Parents were there before: what they pass on is in memory.
            has_entry = fits & (above >= 0)
            above_entry = row * C + tl.maximum(above, 0)
            depth = 1 + tl.load(depth_ptr + above_entry, mask=has_entry, other=0)
            value = tl.load(value_ptr + above_entry, mask=has_entry, other=1.0) * offered
            stopped = tl.load(stopped_ptr + above_entry, mask=has_entry, other=0).to(tl.int32)
            for number in range(num_stops):
                is_stop_token = new_token == tl.load(stops_ptr + row * _STOPS + number)
                stopped |= (is_stop_token & (length - 1 + depth >= min_end)).to(tl.int32)
            tl.store(token_ptr + to, new_token, mask=fits)
            tl.store(parent_ptr + to, above, mask=fits)
            tl.store(depth_ptr + to, depth, mask=fits)
            tl.store(acceptance_ptr + to, offered, mask=fits)
            tl.store(value_ptr + to, value, mask=fits)
            its_ids = tl.where(places[None, :] == place, node_id[:, None], 0)
            tl.store(ids_ptr + to[:, None] * D + places[None, :], its_ids, mask=fits[:, None])
            tl.store(drafters_ptr + to, (tl.zeros_like(to) + drafter).to(tl.int8), mask=fits)
            tl.store(stopped_ptr + to, stopped != 0, mask=fits)
            tl.store(slot_ptr + to, tl.full((ROWS * K,), -1, tl.int32), mask=fits)
            tl.store(expanded_ptr + to, to < 0, mask=fits)
            live_count = tl.minimum(live_count + tl.sum(fresh.to(tl.int32)), C)
            is_full = tl.maximum(is_full, tl.max((fresh & (fits == 0)).to(tl.int32)))
            merged = tl.maximum(merged, tl.max(known.to(tl.int32)))
            next_id += tl.sum(gets_id)
        if merged > 0:
            tl.debug_barrier()
            live = index < live_count
            acceptance, parent = tl.load(acceptance_ptr + entry), tl.load(parent_ptr + entry)
            value = revalue_entries(tl.load(value_ptr + entry), acceptance, parent, live)
            tl.store(value_ptr + entry, value, mask=live)
        tl.store(count_ptr + row, live_count)
        tl.store(next_id_ptr + row, next_id)
        if is_full > 0:
            tl.store(lost_ptr + row * D + place, is_full > 0)
