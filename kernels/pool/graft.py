"""A round's records take effect: growth joins the pools, row edits are carried out, in the order in which they came.

What a node becomes, one after the other within its row (`Verdict` names the outcomes):

1.  Its id is known among the place's ids, of entries or of the trail: DUPLICATE.
2.  Its parent: id 0 is the committed token at index as_of - 1, if max(1, length - T + 1) <= as_of <= length; another
    number is the entry or the committed token of the trail with that id of the place. Neither: UNKNOWN_PARENT, or
    STALE and `lost` if as_of <= length - T too.
3.  The parent is committed and not the root: the node can only be the committed token behind it. It is: ABSORBED, the
    trail remembers the larger id. It is not: CONTRADICTED.
4.  The parent is the root or an entry. An entry with that parent and token takes the larger id and the larger
    acceptance: MERGED. Otherwise APPENDED, or FULL and `lost`.

What the other records do stands in `outrider.kernels.pool.records`. Shapes: G records, and as in `columns.py`.
"""

# compile-time parameters of kernels are upper case; the kernel is one function
# ruff: noqa: N803, PLR0912, PLR0915

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from outrider.kernels.argument_checks import check_dtype, check_place
from outrider.kernels.backend import check_shape, jit, tl, uses_triton
from outrider.kernels.compiled import compiled
from outrider.kernels.early_launch import early_options
from outrider.kernels.pool.columns import MAX_STOPS, Pool, PoolArrays, RowState
from outrider.kernels.pool.entries import (
    find_child,
    free_released,
    is_stop,
    keep_entries,
    launch_free_released,
    release,
    release_cached,
    release_slots,
    revalue,
    revalue_entries,
    store_entries,
)
from outrider.kernels.pool.records import SLOTS_PER_RECORD, TOKENS_PER_RECORD, WORDS, RecordKind, Verdict

__all__ = ["graft", "graft_reference"]

_INT32 = (torch.int32,)
_UNKNOWN = tl.constexpr(int(RecordKind.NOTHING))
_GROWTH = tl.constexpr(int(RecordKind.GROWTH))
_OPEN = tl.constexpr(int(RecordKind.OPEN))
_CLOSE = tl.constexpr(int(RecordKind.CLOSE))
_PREEMPT = tl.constexpr(int(RecordKind.PREEMPT))
_LIMITS = tl.constexpr(int(RecordKind.LIMITS))
_SLOTS = tl.constexpr(int(RecordKind.SLOTS))
_FORGET = tl.constexpr(int(RecordKind.FORGET))
_RESENT = tl.constexpr(int(RecordKind.RESENT))
_COMMIT = tl.constexpr(int(RecordKind.COMMIT))
_PREFILL = tl.constexpr(int(RecordKind.PREFILL))
_INVALID = tl.constexpr(int(Verdict.INVALID))
_OLD_GENERATION = tl.constexpr(int(Verdict.OLD_GENERATION))
_EDITED = tl.constexpr(int(Verdict.EDITED))
_APPENDED = tl.constexpr(int(Verdict.APPENDED))
_MERGED = tl.constexpr(int(Verdict.MERGED))
_ABSORBED = tl.constexpr(int(Verdict.ABSORBED))
_DUPLICATE = tl.constexpr(int(Verdict.DUPLICATE))
_UNKNOWN_PARENT = tl.constexpr(int(Verdict.UNKNOWN_PARENT))
_STALE = tl.constexpr(int(Verdict.STALE))
_CONTRADICTED = tl.constexpr(int(Verdict.CONTRADICTED))
_FULL = tl.constexpr(int(Verdict.FULL))
_EMPTY_STATE = tl.constexpr(int(RowState.EMPTY))
_PREFILL_STATE = tl.constexpr(int(RowState.PREFILL))
_RUNNING_STATE = tl.constexpr(int(RowState.RUNNING))
_HELD_STATE = tl.constexpr(int(RowState.HELD))
_WORDS = tl.constexpr(WORDS)
_SLOTS_PER_RECORD = tl.constexpr(SLOTS_PER_RECORD)
_TOKENS = tl.constexpr(TOKENS_PER_RECORD)
_STOPS = tl.constexpr(MAX_STOPS)
# Records that a program looks through at a time for those of its row.
_BLOCK = 128
# A parent that no entry has.
_NO_ENTRY = tl.constexpr(-2)
# `depths` holds two columns: bit 16 is `stopped`, the bits below are the depth.
_STOPPED_BIT, _DEPTH_BITS = tl.constexpr(16), tl.constexpr((1 << 16) - 1)
# Kinds of which the place is one of D.
_OF_PLACES = (RecordKind.GROWTH, RecordKind.FORGET, RecordKind.RESENT)
# More than any index: the minimum over nothing.
_NEVER = tl.constexpr(2**31 - 1)


def graft(
    pool: Pool,
    records: torch.Tensor,
    count: torch.Tensor,
    verdicts: torch.Tensor,
    commits: torch.Tensor,
    num_commits: torch.Tensor,
) -> None:
    """Carry out the first `count` records, and collect the tokens that they commit.

    Args:
        pool: changed.
        records: [G, 8] int32, as `outrider.kernels.pool.records.Records` lays them out.
        count: [1] int32, at most G.
        verdicts: [G] int32, written up to `count`: a `Verdict` each.
        commits: [S, M] int32, written up to `num_commits`: the tokens committed to each row, as `re_root` takes them.
        num_commits: [S] int32, written: how many of them.

    Raises:
        ValueError: a shape, dtype or device that does not fit, naming the argument.
    """
    rows = records.shape[0]
    check_shape("records", records, (rows, WORDS))
    check_shape("count", count, (1,))
    check_shape("verdicts", verdicts, (rows,))
    check_shape("commits", commits, (pool.sessions, commits.shape[-1]))
    check_shape("num_commits", num_commits, (pool.sessions,))
    for name, tensor in (
        ("records", records),
        ("count", count),
        ("verdicts", verdicts),
        ("commits", commits),
        ("num_commits", num_commits),
    ):
        check_dtype(name, tensor, _INT32)
        check_place(name, tensor, pool.device, "pool")
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: strides {tensor.stride()} given, a contiguous tensor needed")
    if uses_triton(records):
        _launch(pool, records, count, verdicts, commits, num_commits)
    else:
        graft_reference(pool, records, count, verdicts, commits, num_commits)


def graft_reference(
    pool: Pool,
    records: torch.Tensor,
    count: torch.Tensor,
    verdicts: torch.Tensor,
    commits: torch.Tensor,
    num_commits: torch.Tensor,
) -> None:
    """`graft` on a CPU, one record after the other."""
    words = records.numpy()
    rows = min(int(count), len(words))
    _graft(pool.arrays, words, words.view(np.float32), rows, verdicts.numpy(), commits.numpy(), num_commits.numpy())


@compiled
def _graft(arrays: Any, records: Any, floats: Any, count: int, verdicts: Any, commits: Any, num_commits: Any) -> None:
    pool = PoolArrays(*arrays)
    num_commits[:] = 0
    for number in range(count):
        row = records[number, 1]
        if row < 0 or row >= len(pool.count):
            verdicts[number] = Verdict.INVALID
            continue
        kind, place = records[number, 0] & 0xFF, records[number, 0] >> 8 & 0xFF
        in_force = records[number, 2] == pool.generation[row] and pool.state[row] != RowState.EMPTY
        if kind != RecordKind.OPEN and not in_force:
            verdicts[number] = Verdict.OLD_GENERATION
        elif kind in _OF_PLACES and place >= pool.ids.shape[2]:
            verdicts[number] = Verdict.INVALID
        elif kind == RecordKind.GROWTH:
            verdicts[number] = _graft_node(
                pool,
                row,
                place,
                # A byte with a sign, as the column has it.
                ((records[number, 0] >> 16 & 0xFF) ^ 0x80) - 0x80,
                records[number, 3],
                records[number, 4],
                records[number, 5],
                records[number, 6],
                floats[number, 7],
            )
        else:
            verdicts[number] = _edit(pool, records[number], row, kind, place, commits, num_commits)
    for number in range(count):
        if verdicts[number] == Verdict.MERGED:
            revalue(pool, records[number, 1])
    free_released(pool)


@compiled
def _graft_node(  # noqa: PLR0911
    pool: Any,
    row: int,
    place: int,
    drafter: int,
    node_id: int,
    parent_id: int,
    as_of: int,
    token: int,
    acceptance: Any,
) -> int:
    length, count, trail = pool.length[row], pool.count[row], pool.root_ids.shape[1]
    # The parent: an entry (-1 the root), or the committed token at an index.
    parent, index = -2, -1
    if parent_id == 0 and max(1, length - trail + 1) <= as_of <= length:
        index = as_of - 1
    for entry in range(count):
        known = pool.ids[row, entry, place]
        if known == node_id:
            return Verdict.DUPLICATE
        if known == parent_id and known > 0:
            parent = entry
    for number in range(trail):
        known = pool.root_ids[row, number, place]
        if known == node_id:
            return Verdict.DUPLICATE
        if known == parent_id and known > 0:
            index = length - 1 - (length - 1 - number) % trail
    if index == length - 1:
        parent = -1
    if index < 0 and parent < 0:
        if as_of > length - trail:
            return Verdict.UNKNOWN_PARENT
        pool.lost[row, place] = True
        return Verdict.STALE
    if parent < -1:
        if pool.history[row, index + 1] != token:
            return Verdict.CONTRADICTED
        remembered = (index + 1) % trail
        pool.root_ids[row, remembered, place] = max(pool.root_ids[row, remembered, place], node_id)
        return Verdict.ABSORBED
    entry = find_child(pool.parent[row], pool.token[row], count, parent, token)
    if entry >= 0:
        pool.ids[row, entry, place] = max(pool.ids[row, entry, place], node_id)
        pool.acceptance[row, entry] = max(pool.acceptance[row, entry], acceptance)
        pool.drafters[row, entry] |= drafter
        return Verdict.MERGED
    if count == pool.token.shape[1]:
        pool.lost[row, place] = True
        return Verdict.FULL
    depth = 1 if parent < 0 else pool.depth[row, parent] + 1
    pool.token[row, count] = token
    pool.parent[row, count] = parent
    pool.depth[row, count] = depth
    pool.acceptance[row, count] = acceptance
    pool.value[row, count] = acceptance if parent < 0 else pool.value[row, parent] * acceptance
    for other in range(pool.ids.shape[2]):
        pool.ids[row, count, other] = 0
    pool.ids[row, count, place] = node_id
    pool.drafters[row, count] = drafter
    ends = is_stop(pool.stops[row], pool.min_end[row], token, length - 1 + depth)
    pool.stopped[row, count] = ends or (parent >= 0 and pool.stopped[row, parent])
    if len(pool.slot) > 0:
        pool.slot[row, count] = -1
        pool.expanded[row, count] = False
    pool.count[row] = count + 1
    return Verdict.APPENDED


@compiled
def _edit(pool: Any, record: Any, row: int, kind: int, place: int, commits: Any, num_commits: Any) -> int:
    capacity, drafts = pool.token.shape[1], len(pool.slot) > 0
    if kind == RecordKind.OPEN:
        most_cached = 0 if drafts else record[3] - 1
        if not (1 <= record[3] <= pool.history.shape[1] and 0 <= record[4] <= most_cached):
            return Verdict.INVALID
        keep_entries(pool, row, np.zeros(capacity, np.bool_))
        if drafts:
            release_cached(pool, row)
        for other in range(pool.ids.shape[2]):
            _forget_trail(pool, row, other)
            pool.lost[row, other] = False
        pool.state[row] = RowState.PREFILL
        if drafts or record[4] == record[3] - 1:
            pool.state[row] = RowState.RUNNING if record[3] < record[6] else RowState.HELD
        pool.generation[row] = record[2]
        pool.length[row], pool.cached[row], pool.end[row], pool.allow[row] = record[3], record[4], record[5], record[6]
        pool.table_len[row] = record[4]
        num_commits[row] = 0
        if drafts:
            pool.next_id[row] = 1
    elif kind == RecordKind.CLOSE:
        keep_entries(pool, row, np.zeros(capacity, np.bool_))
        if drafts:
            release_cached(pool, row)
        pool.state[row] = RowState.EMPTY
        num_commits[row] = 0
    elif kind == RecordKind.PREEMPT and drafts:
        release(pool, row)
        release_cached(pool, row)
        pool.state[row], pool.allow[row], pool.table_len[row] = RowState.HELD, 0, 0
    elif kind == RecordKind.LIMITS:
        pool.end[row], pool.allow[row] = record[3], record[4]
        if pool.state[row] == RowState.RUNNING and pool.length[row] >= pool.allow[row]:
            pool.state[row] = RowState.HELD
        elif pool.state[row] == RowState.HELD and pool.length[row] < pool.allow[row]:
            pool.state[row] = RowState.RUNNING
    elif kind == RecordKind.SLOTS:
        for number in range(min(place, SLOTS_PER_RECORD)):
            if 0 <= record[3] + number < pool.table.shape[1]:
                pool.table[row, record[3] + number] = record[4 + number]
        pool.table_len[row] = min(max(record[3] + place, 0), pool.table.shape[1])
    elif kind == RecordKind.FORGET:
        _forget_trail(pool, row, place)
        keep = np.zeros(capacity, np.bool_)
        for entry in range(pool.count[row]):
            pool.ids[row, entry, place] = 0
            for other in range(pool.ids.shape[2]):
                keep[entry] |= pool.ids[row, entry, other] > 0
        keep_entries(pool, row, keep)
    elif kind == RecordKind.RESENT:
        pool.lost[row, place] = False
    elif kind == RecordKind.COMMIT:
        before = num_commits[row]
        if not (1 <= place <= TOKENS_PER_RECORD and before + place <= commits.shape[1]):
            return Verdict.INVALID
        for number in range(place):
            commits[row, before + number] = record[3 + number]
        num_commits[row] = before + place
    elif drafts or kind != RecordKind.PREFILL:
        return Verdict.INVALID
    return Verdict.EDITED


@compiled
def _forget_trail(pool: Any, row: int, place: int) -> None:
    for number in range(pool.root_ids.shape[1]):
        pool.root_ids[row, number, place] = 0


def _launch(
    pool: Pool,
    records: torch.Tensor,
    count: torch.Tensor,
    verdicts: torch.Tensor,
    commits: torch.Tensor,
    num_commits: torch.Tensor,
) -> None:
    nodes = pool.nodes
    none = pool.count
    _graft_kernel[(pool.sessions,)](
        records,
        count,
        verdicts,
        commits,
        num_commits,
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
        pool.state,
        pool.generation,
        pool.end,
        pool.allow,
        pool.table,
        pool.table_len,
        pool.lost,
        pool.stops,
        pool.min_end,
        none if nodes is None else nodes.slot,
        none if nodes is None else nodes.expanded,
        none if nodes is None else nodes.next_id,
        none if nodes is None else nodes.released,
        none if nodes is None else nodes.released_count,
        none if nodes is None else nodes.released_cached,
        records.shape[0],
        commits.shape[1],
        pool.max_len,
        pool.table.shape[1],
        S=pool.sessions,
        C=pool.capacity,
        D=pool.places,
        T=pool.trail,
        HAS_SLOTS=nodes is not None,
        BLOCK=_BLOCK,
        num_warps=1,
        **early_options(pool.device),
    )
    if nodes is not None:
        launch_free_released(pool)


@jit(do_not_specialize=["capacity_of_records", "most_commits", "max_len", "table_width"])
def _graft_kernel(
    records_ptr,  # [G, 8] int32
    count_of_records_ptr,  # [1] int32
    verdicts_ptr,  # [G] int32
    commits_ptr,  # [S, most_commits] int32
    num_commits_ptr,  # [S] int32
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
    state_ptr,  # [S] int8
    generation_ptr,  # [S] int32
    end_ptr,  # [S] int32
    allow_ptr,  # [S] int32
    table_ptr,  # [S, table_width] int32
    table_len_ptr,  # [S] int32
    lost_ptr,  # [S, D] bool
    stops_ptr,  # [S, 64] int32
    min_end_ptr,  # [S] int32
    slot_ptr,  # [S, C] int32
    expanded_ptr,  # [S, C] bool
    next_id_ptr,  # [S] int32
    released_ptr,  # [S, C] int32
    released_count_ptr,  # [S] int32
    released_cached_ptr,  # [S] int32
    capacity_of_records,
    most_commits,
    max_len,
    table_width,
    S: tl.constexpr,
    C: tl.constexpr,
    D: tl.constexpr,
    T: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    # A program is a row and a warp. What is searched for every node stays in registers until the end; acceptances, ids,
    # kinds of drafters and slots are written at once.
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    records = tl.minimum(tl.load(count_of_records_ptr), capacity_of_records)
    index, trail_index, places = tl.arange(0, C), tl.arange(0, T), tl.arange(0, D)
    entry = row * C + index
    ids, trail = ids_ptr + row * C * D, root_ids_ptr + row * T * D
    table, history = table_ptr + row.to(tl.int64) * table_width, history_ptr + row.to(tl.int64) * max_len
    count, length, min_end = tl.load(count_ptr + row), tl.load(length_ptr + row), tl.load(min_end_ptr + row)
    generation, state = tl.load(generation_ptr + row), tl.load(state_ptr + row).to(tl.int32)
    cached = tl.load(cached_ptr + row)
    stops = tl.load(stops_ptr + row * _STOPS + tl.arange(0, _STOPS))
    tokens, parents, values = tl.load(token_ptr + entry), tl.load(parent_ptr + entry), tl.load(value_ptr + entry)
    depths = tl.load(depth_ptr + entry) | (tl.load(stopped_ptr + entry).to(tl.int32) << _STOPPED_BIT)
    parents = tl.where(index < count, parents, _NO_ENTRY)
    # The ids of one place: records of a place follow one another.
    known, known_before, known_place = tl.zeros((C,), tl.int32), tl.zeros((T,), tl.int32), -1
    released_count, released_cached, num_commits, merged, grown, touched = 0, 0, 0, 0, 0, 0
    for begin in range(0, records, BLOCK):
        numbers = begin + tl.arange(0, BLOCK)
        rows = tl.load(records_ptr + numbers * _WORDS + 1, mask=numbers < capacity_of_records, other=-1)
        if row == 0:
            no_row = (numbers < records) & ((rows < 0) | (rows >= S))
            tl.store(verdicts_ptr + numbers, tl.full((BLOCK,), _INVALID, tl.int32), mask=no_row)
        pending = tl.where((rows == row) & (numbers < records), numbers, _NEVER)
        number = tl.min(pending)
        record = records_ptr + tl.minimum(number, capacity_of_records - 1) * _WORDS
        next_head, next_generation, next_word3 = tl.load(record), tl.load(record + 2), tl.load(record + 3)
        next_word4, next_word5, next_word6 = tl.load(record + 4), tl.load(record + 5), tl.load(record + 6)
        next_word7 = tl.load(record + 7)
        while number < _NEVER:
            # This record's words are here; the next one's are on their way.
            head, its_generation, word3, word4 = next_head, next_generation, next_word3, next_word4
            word5, word6, word7, this = next_word5, next_word6, next_word7, number
            pending = tl.where(pending > number, pending, _NEVER)
            number = tl.min(pending)
            record = records_ptr + tl.minimum(number, capacity_of_records - 1) * _WORDS
            next_head, next_generation, next_word3 = tl.load(record), tl.load(record + 2), tl.load(record + 3)
            next_word4, next_word5, next_word6 = tl.load(record + 4), tl.load(record + 5), tl.load(record + 6)
            next_word7 = tl.load(record + 7)
            kind, place, drafter = head & 0xFF, (head >> 8) & 0xFF, (head >> 16) & 0xFF
            most_cached = tl.where(HAS_SLOTS, 0, word3 - 1)
            opens_wrongly = (kind == _OPEN) & ((word3 < 1) | (word3 > max_len) | (word4 < 0) | (word4 > most_cached))
            if (place >= D) & ((kind == _GROWTH) | (kind == _FORGET) | (kind == _RESENT)):
                kind = _UNKNOWN + 0
            verdict = _EDITED + 0
            if (kind != _OPEN) & ((its_generation != generation) | (state == _EMPTY_STATE)):
                verdict = _OLD_GENERATION + 0
            elif opens_wrongly:
                verdict = _INVALID + 0
            elif kind == _GROWTH:
                node_id, as_of, token, offered = word3, word5, word6, word7.to(tl.float32, bitcast=True)
                # Parent id 0 names a committed token by `as_of`; -1 matches no id.
                parent_id = tl.where(word4 == 0, -1, word4)
                if place != known_place:
                    tl.debug_barrier()
                    known = tl.load(ids + index * D + place, mask=index < count, other=0)
                    known_before = tl.load(trail + trail_index * D + place)
                    known_place = place
                # One sum finds out both whether the id is known and where the parent is: each occurs once at most.
                found = tl.sum(tl.where(known == node_id, 1 << 28, 0) + tl.where(known == parent_id, index + 1, 0))
                found_before = tl.sum(
                    tl.where(known_before == node_id, 1 << 28, 0)
                    + tl.where(known_before == parent_id, trail_index + 1, 0)
                )
                # The parent: an entry (-1 the root), or the committed token at an index.
                parent, in_trail = (found & 0xFFFF) - 1, (found_before & 0xFFFF) - 1
                committed = tl.where(in_trail >= 0, length - 1 - ((length - 1 - in_trail) & (T - 1)), -1)
                near = (as_of >= tl.maximum(1, length - T + 1)) & (as_of <= length)
                committed = tl.where((word4 == 0) & near, as_of - 1, committed)
                is_past = (committed >= 0) & (committed < length - 1)
                child = tl.max(tl.where((parents == parent) & (tokens == token), index, -1))
                # Of the parent entry, 0 for the root; bits of values that are not negative are ordered as they are.
                above = tl.max(tl.where(index == parent, depths, 0))
                value_above = tl.max(tl.where(index == parent, values.to(tl.int32, bitcast=True), 0))
                is_stop_token = tl.max((stops == token).to(tl.int32))
                behind = tl.load(history + committed + 1, mask=is_past, other=-1)
                verdict = tl.where(child >= 0, _MERGED, tl.where(count == C, _FULL, _APPENDED))
                verdict = tl.where(is_past, tl.where(behind == token, _ABSORBED, _CONTRADICTED), verdict)
                is_unknown = (parent < 0) & (committed < 0)
                verdict = tl.where(is_unknown, tl.where(as_of <= length - T, _STALE, _UNKNOWN_PARENT), verdict)
                verdict = tl.where((found | found_before) >= 1 << 28, _DUPLICATE, verdict)
                if verdict == _APPENDED:
                    here, at = index == count, row * C + count
                    depth, stopped = (above & _DEPTH_BITS) + 1, above >> _STOPPED_BIT
                    stopped |= tl.where(length - 1 + depth >= min_end, is_stop_token, 0)
                    value = tl.where(parent < 0, 1.0, value_above.to(tl.float32, bitcast=True)) * offered
                    tokens, parents = tl.where(here, token, tokens), tl.where(here, parent, parents)
                    values, known = tl.where(here, value, values), tl.where(here, node_id, known)
                    depths = tl.where(here, depth | (stopped << _STOPPED_BIT), depths)
                    tl.store(acceptance_ptr + at, offered)
                    tl.store(ids + count * D + places, tl.where(places == place, node_id, 0))
                    tl.store(drafters_ptr + at, drafter.to(tl.int8))
                    if HAS_SLOTS:
                        tl.store(slot_ptr + at, tl.full((), -1, tl.int32))
                        tl.store(expanded_ptr + at, child >= 0)
                    count += 1
                    grown = 1
                elif verdict == _MERGED:
                    at = row * C + child
                    known = tl.where(index == child, tl.maximum(known, node_id), known)
                    tl.store(ids + index * D + place, known, mask=index == child)
                    tl.store(acceptance_ptr + at, tl.maximum(tl.load(acceptance_ptr + at), offered))
                    tl.store(drafters_ptr + at, (tl.load(drafters_ptr + at).to(tl.int32) | drafter).to(tl.int8))
                    merged = 1
                elif verdict == _ABSORBED:
                    remembered = trail_index == ((committed + 1) & (T - 1))
                    known_before = tl.where(remembered, tl.maximum(known_before, node_id), known_before)
                    tl.store(trail + trail_index * D + place, known_before, mask=remembered)
                elif (verdict == _STALE) | (verdict == _FULL):
                    tl.store(lost_ptr + row * D + place, place >= 0)
            elif (kind == _OPEN) | (kind == _CLOSE) | (HAS_SLOTS & (kind == _PREEMPT)):
                tl.debug_barrier()
                if HAS_SLOTS:
                    gone = (index < count) & (tl.load(expanded_ptr + entry) != 0)
                    released = released_ptr + row * C
                    released_count = release_slots(tl.load(slot_ptr + entry), gone, released, released_count)
                    tl.store(slot_ptr + entry, tl.full((C,), -1, tl.int32))
                    tl.store(expanded_ptr + entry, index < 0)
                    released_cached += cached
                    cached = 0
                if kind == _PREEMPT:
                    state = _HELD_STATE + 0
                    tl.store(allow_ptr + row, tl.zeros((), tl.int32))
                    tl.store(table_len_ptr + row, tl.zeros((), tl.int32))
                else:
                    count, known_place, num_commits = 0, -1, 0
                    parents = tl.full((C,), _NO_ENTRY, tl.int32)
                    state = _EMPTY_STATE + 0
                if kind == _OPEN:
                    ready = tl.where(word3 < word6, _RUNNING_STATE, _HELD_STATE)
                    state = tl.where(HAS_SLOTS | (word4 == word3 - 1), ready, _PREFILL_STATE)
                    generation, length, cached = its_generation, word3, word4
                    tl.store(trail + trail_index[:, None] * D + places[None, :], tl.zeros((T, D), tl.int32))
                    tl.store(lost_ptr + row * D + places, places < 0)
                    tl.store(table_len_ptr + row, word4)
                    tl.store(end_ptr + row, word5)
                    tl.store(allow_ptr + row, word6)
                    if HAS_SLOTS:
                        tl.store(next_id_ptr + row, tl.full((), 1, tl.int32))
            elif kind == _LIMITS:
                tl.store(end_ptr + row, word3)
                tl.store(allow_ptr + row, word4)
                if (state == _RUNNING_STATE) & (length >= word4):
                    state = _HELD_STATE + 0
                elif (state == _HELD_STATE) & (length < word4):
                    state = _RUNNING_STATE + 0
            elif kind == _SLOTS:
                tl.debug_barrier()
                given = tl.arange(0, _SLOTS_PER_RECORD)
                at = word3 + given
                fits = (given < place) & (at >= 0) & (at < table_width)
                tl.store(table + at, tl.load(records_ptr + this * _WORDS + 4 + given), mask=fits)
                tl.store(table_len_ptr + row, tl.minimum(tl.maximum(word3 + place, 0), table_width))
            elif kind == _FORGET:
                tl.debug_barrier()
                tl.store(trail + trail_index * D + place, tl.zeros((T,), tl.int32))
                live = index < count
                all_ids = tl.load(ids + index[:, None] * D + places[None, :], mask=live[:, None], other=0)
                all_ids = tl.where((places == place)[None, :], 0, all_ids)
                keep = tl.max(all_ids, 1) > 0
                acceptance, drafters = tl.load(acceptance_ptr + entry), tl.load(drafters_ptr + entry)
                moved = tl.cumsum(keep.to(tl.int32), 0) - 1
                parents = tl.where(parents < 0, -1, tl.gather(moved, tl.maximum(parents, 0), 0))
                if HAS_SLOTS:
                    slot, expanded = tl.load(slot_ptr + entry), tl.load(expanded_ptr + entry)
                    gone = live & (keep == 0) & (expanded != 0)
                    released_count = release_slots(slot, gone, released_ptr + row * C, released_count)
                tl.debug_barrier()
                store_entries(
                    row * C + moved, keep, tokens, parents, depths & _DEPTH_BITS, acceptance, values, all_ids, drafters,
                    (depths >> _STOPPED_BIT) != 0, token_ptr, parent_ptr, depth_ptr, acceptance_ptr, value_ptr, ids_ptr,
                    drafters_ptr, stopped_ptr, D,
                )  # fmt: skip
                if HAS_SLOTS:
                    tl.store(slot_ptr + row * C + moved, slot, mask=keep)
                    tl.store(expanded_ptr + row * C + moved, expanded, mask=keep)
                count = tl.sum(keep.to(tl.int32))
                tl.debug_barrier()
                tokens, parents = tl.load(token_ptr + entry), tl.load(parent_ptr + entry)
                values = tl.load(value_ptr + entry)
                depths = tl.load(depth_ptr + entry) | (tl.load(stopped_ptr + entry).to(tl.int32) << _STOPPED_BIT)
                parents = tl.where(index < count, parents, _NO_ENTRY)
                known_place = -1
            elif kind == _RESENT:
                tl.store(lost_ptr + row * D + place, kind != _RESENT)
            elif kind == _PREFILL:
                verdict = tl.where(HAS_SLOTS, _INVALID, _EDITED)
            elif (kind == _COMMIT) & (place >= 1) & (place <= _TOKENS) & (num_commits + place <= most_commits):
                given = tl.arange(0, _WORDS)
                committed_tokens = tl.load(records_ptr + this * _WORDS + 3 + given, mask=given < place)
                to = commits_ptr + row * most_commits + num_commits + given
                tl.store(to, committed_tokens, mask=given < place)
                num_commits += place
            else:
                verdict = _INVALID + 0
            tl.store(verdicts_ptr + this, verdict)
            touched = 1

    tl.store(num_commits_ptr + row, num_commits)
    live = index < count
    if merged > 0:
        tl.debug_barrier()
        values = revalue_entries(values, tl.load(acceptance_ptr + entry), parents, live)
    if (grown | merged) > 0:
        tl.store(token_ptr + entry, tokens, mask=live)
        tl.store(parent_ptr + entry, parents, mask=live)
        tl.store(depth_ptr + entry, depths & _DEPTH_BITS, mask=live)
        tl.store(stopped_ptr + entry, (depths >> _STOPPED_BIT) != 0, mask=live)
        tl.store(value_ptr + entry, values, mask=live)
    if touched > 0:
        tl.store(count_ptr + row, count)
        tl.store(length_ptr + row, length)
        tl.store(cached_ptr + row, cached)
        tl.store(generation_ptr + row, generation)
        tl.store(state_ptr + row, (state + tl.zeros((), tl.int32)).to(tl.int8))
        if HAS_SLOTS:
            tl.store(released_count_ptr + row, released_count)
            tl.store(released_cached_ptr + row, released_cached)
