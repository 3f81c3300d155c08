"""Chunks of prompts in a target's round: committed tokens get their KV beside the rows that are verified.

    take_chunks    between graft and select: which PREFILL records of the round are used
    pack_chunks    behind pack: their rows, behind the verified ones

A record is used if all of this holds; records that are not change nothing, and the host, which sees in the row's
`cached` that they were not used, plans again:

    -   the record's generation is that of the row, and the row is in PREFILL
    -   start = cached: a chunk planned ahead of one that was not used is not used either
    -   size >= 1 and start + size <= length - 1: the root is no part of a chunk
    -   the table has slots up to start + size, and one for the root if the chunk reaches it (start + size = length - 1)
    -   the row has no other chunk in the round
    -   there is room: one of N_c chunks, and `size` of P rows. Whatever fits is used in the records' order, a smaller
        chunk also behind one that did not fit

Then `cached` is start + size. A row whose prompt is done (cached = length - 1) is RUNNING, or HELD if length >= allow,
before `select` looks at it: its root and its entries are verified in the round of its last chunk. Root and chunk are
two sessions of attention over one row of the pool: a round stores all keys and values of a layer before it attends.

`take_chunks` reserves a session of the bucket for each chunk; `pack_chunks` ends the reservation, so that a round
without prefill finds none. Shapes: N_c chunks, P of their rows; G records; R, N as in `pack.py`; others as in
`columns.py`.
"""

# compile-time parameters of kernels are upper case
# ruff: noqa: N803

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from outrider.kernels.argument_checks import check_at_least, check_dtype, check_place
from outrider.kernels.backend import check_shape, jit, tl, triton, uses_triton
from outrider.kernels.compiled import compiled
from outrider.kernels.early_launch import early_options
from outrider.kernels.pool.columns import Columns, Pool, PoolArrays, RowState, arrays_type
from outrider.kernels.pool.pack import COMMITTED, Packed, PackedArrays
from outrider.kernels.pool.records import WORDS, RecordKind
from outrider.kernels.pool.select import Selection, SelectionArrays

__all__ = ["Chunks", "pack_chunks", "pack_chunks_reference", "take_chunks", "take_chunks_reference"]

_INT32 = (torch.int32,)
_PREFILL = tl.constexpr(int(RecordKind.PREFILL))
_PREFILL_STATE = tl.constexpr(int(RowState.PREFILL))
_RUNNING_STATE = tl.constexpr(int(RowState.RUNNING))
_HELD_STATE = tl.constexpr(int(RowState.HELD))
_COMMITTED = tl.constexpr(COMMITTED)
_WORDS = tl.constexpr(WORDS)
# More than any index: the minimum over nothing.
_NEVER = tl.constexpr(2**31 - 1)
# Records that are looked through at a time, and rows that a program packs.
_RECORDS = 512
_ROWS = 128


@dataclass(frozen=True, kw_only=True, eq=False)
class Chunks(Columns):
    """The chunks of a round. Build one with `allocate`.

    Attributes:
        count: [1] int32: chunks of the round.
        pool_rows: [N_c] int32: the chunk's row of the pool; -1 behind the last chunk.
        starts: [N_c] int32: index of the chunk's first token; 0 behind the last.
        sizes: [N_c] int32: its tokens; 0 behind the last.
        first: [N_c] int32: sum of the sizes before; `total` behind the last.
        total: [1] int32: rows of all chunks.
        most_rows: P.
    """

    count: torch.Tensor
    pool_rows: torch.Tensor
    starts: torch.Tensor
    sizes: torch.Tensor
    first: torch.Tensor
    total: torch.Tensor
    most_rows: int

    @classmethod
    def allocate(cls, pool: Pool, *, chunks: int, rows: int) -> Chunks:
        """Return room for the chunks of a bucket's rounds.

        Args:
            pool: a target's.
            chunks: N_c, most chunks of a round.
            rows: P, most rows of all chunks of a round.

        Raises:
            ValueError: a size below 1, or the pool of a drafter.
        """
        check_at_least("chunks", chunks, 1)
        check_at_least("rows", rows, 1)
        if pool.nodes is not None:
            raise ValueError("pool: that of a drafter given, a target's needed; a drafter's `select` takes gaps along")

        def column(size: int, fill: int = 0) -> torch.Tensor:
            return torch.full((size,), fill, dtype=torch.int32, device=pool.device)

        return cls(
            count=column(1),
            pool_rows=column(chunks, -1),
            starts=column(chunks),
            sizes=column(chunks),
            first=column(chunks),
            total=column(1),
            most_rows=rows,
        )


ChunksArrays = arrays_type(Chunks)


def take_chunks(
    pool: Pool, records: torch.Tensor, count: torch.Tensor, chunks: Chunks, reserved_sessions: torch.Tensor
) -> None:
    """Use the PREFILL records among a round's first `count`, as far as they hold and fit.

    Args:
        pool: after `graft` of the same records; `cached` and `state` change.
        records: [G, 8] int32, as `outrider.kernels.pool.records.Records` lays them out.
        count: [1] int32, at most G.
        chunks: written.
        reserved_sessions: [1] int32, written: how many chunks; `Selection.reserved_sessions`.

    Raises:
        ValueError: a shape, dtype or device that does not fit, naming the argument.
    """
    check_shape("records", records, (records.shape[0], WORDS))
    check_shape("count", count, (1,))
    check_shape("reserved_sessions", reserved_sessions, (1,))
    for name, tensor in (("records", records), ("count", count), ("reserved_sessions", reserved_sessions)):
        check_dtype(name, tensor, _INT32)
        check_place(name, tensor, pool.device, "pool")
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: strides {tensor.stride()} given, a contiguous tensor needed")
    check_place("chunks", chunks.count, pool.device, "pool")
    if uses_triton(records):
        _launch_taking(pool, records, count, chunks, reserved_sessions)
    else:
        take_chunks_reference(pool, records, count, chunks, reserved_sessions)


def take_chunks_reference(
    pool: Pool, records: torch.Tensor, count: torch.Tensor, chunks: Chunks, reserved_sessions: torch.Tensor
) -> None:
    """`take_chunks` on a CPU, one record after the other."""
    words = records.numpy()
    number = min(int(count), len(words))
    _take_chunks(pool.arrays, words[:number], chunks.arrays, chunks.most_rows, reserved_sessions.numpy())


@compiled
def _take_chunks(pool_arrays: Any, records: Any, arrays: Any, most_rows: int, reserved_sessions: Any) -> None:
    pool, chunks = PoolArrays(*pool_arrays), ChunksArrays(*arrays)
    taken, total = 0, 0
    for number in range(len(records)):
        row, generation = records[number, 1], records[number, 2]
        if records[number, 0] & 0xFF != RecordKind.PREFILL or row < 0 or row >= len(pool.count):
            continue
        if generation != pool.generation[row] or pool.state[row] != RowState.PREFILL:
            continue
        size, start, length = records[number, 3], records[number, 4], pool.length[row]
        # In this order nothing overflows.
        if start != pool.cached[row] or size < 1 or size > length - 1 - start:
            continue
        is_last = start + size == length - 1
        if pool.table_len[row] < start + size + is_last:
            continue
        has_room = taken < len(chunks.pool_rows) and size <= most_rows - total
        for chunk in range(taken):
            has_room &= chunks.pool_rows[chunk] != row
        if not has_room:
            continue
        pool.cached[row] = start + size
        if is_last:
            pool.state[row] = RowState.RUNNING if length < pool.allow[row] else RowState.HELD
        chunks.pool_rows[taken], chunks.starts[taken], chunks.sizes[taken] = row, start, size
        chunks.first[taken] = total
        taken += 1
        total += size
    for chunk in range(taken, len(chunks.pool_rows)):
        chunks.pool_rows[chunk], chunks.starts[chunk], chunks.sizes[chunk], chunks.first[chunk] = -1, 0, 0, total
    chunks.count[0], chunks.total[0] = taken, total
    reserved_sessions[0] = taken


def _launch_taking(
    pool: Pool, records: torch.Tensor, count: torch.Tensor, chunks: Chunks, reserved_sessions: torch.Tensor
) -> None:
    _take_chunks_kernel[(1,)](
        records,
        count,
        pool.length,
        pool.cached,
        pool.state,
        pool.generation,
        pool.allow,
        pool.table_len,
        chunks.count,
        chunks.pool_rows,
        chunks.starts,
        chunks.sizes,
        chunks.first,
        chunks.total,
        reserved_sessions,
        records.shape[0],
        chunks.pool_rows.shape[0],
        chunks.most_rows,
        S=pool.sessions,
        BLOCK_N=triton.next_power_of_2(chunks.pool_rows.shape[0]),
        BLOCK=_RECORDS,
        num_warps=4,
        **early_options(pool.device),
    )


@jit(do_not_specialize=["capacity_of_records", "most_chunks", "most_rows"])
def _take_chunks_kernel(
    records_ptr,  # [G, 8] int32
    count_of_records_ptr,  # [1] int32
    length_ptr,  # [S] int32
    cached_ptr,  # [S] int32
    state_ptr,  # [S] int8
    generation_ptr,  # [S] int32
    allow_ptr,  # [S] int32
    table_len_ptr,  # [S] int32
    count_ptr,  # [1] int32
    pool_rows_ptr,  # [N_c] int32
    starts_ptr,  # [N_c] int32
    sizes_ptr,  # [N_c] int32
    first_ptr,  # [N_c] int32
    total_ptr,  # [1] int32
    reserved_sessions_ptr,  # [1] int32
    capacity_of_records,
    most_chunks,
    most_rows,
    S: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    # One program. Rows have one chunk, so what a record needs can be read for a block at once: nothing has changed it.
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    records = tl.minimum(tl.load(count_of_records_ptr), capacity_of_records)
    chunk = tl.arange(0, BLOCK_N)
    pool_rows, starts = tl.full((BLOCK_N,), -1, tl.int32), tl.zeros((BLOCK_N,), tl.int32)
    sizes = tl.zeros((BLOCK_N,), tl.int32)
    taken, total = 0, 0
    for begin in range(0, records, BLOCK):
        numbers = begin + tl.arange(0, BLOCK)
        record = records_ptr + numbers * _WORDS
        kinds = tl.load(record, mask=numbers < records, other=0) & 0xFF
        rows = tl.load(record + 1, mask=kinds == _PREFILL, other=-1)
        asks = (rows >= 0) & (rows < S)
        if tl.max(asks.to(tl.int32)) > 0:
            size, start = tl.load(record + 3, mask=asks, other=0), tl.load(record + 4, mask=asks, other=0)
            # Where `start` is not negative, which `cached` sees to, nothing here overflows.
            left = tl.load(length_ptr + rows, mask=asks, other=0) - 1 - start
            needed = start + size + (size == left).to(tl.int32)
            holds = asks & (start == tl.load(cached_ptr + rows, mask=asks, other=0)) & (size >= 1) & (size <= left)
            holds = holds & (tl.load(table_len_ptr + rows, mask=asks, other=0) >= needed)
            holds = holds & (tl.load(state_ptr + rows, mask=asks, other=0) == _PREFILL_STATE)
            generation = tl.load(record + 2, mask=asks, other=0)
            holds = holds & (tl.load(generation_ptr + rows, mask=asks, other=0) == generation)
            holds = holds & (tl.max((rows[:, None] == pool_rows[None, :]).to(tl.int32), 1) == 0)
            # What does not fit in its turn never will.
            number = tl.min(tl.where(holds & (size <= most_rows - total), numbers, _NEVER))
            while (number < _NEVER) & (taken < most_chunks):
                this, here = numbers == number, chunk == taken
                row, its_size = tl.sum(tl.where(this, rows, 0)), tl.sum(tl.where(this, size, 0))
                pool_rows, sizes = tl.where(here, row, pool_rows), tl.where(here, its_size, sizes)
                starts = tl.where(here, tl.sum(tl.where(this, start, 0)), starts)
                taken += 1
                total += its_size
                holds = holds & (rows != row)
                number = tl.min(tl.where(holds & (size <= most_rows - total), numbers, _NEVER))
    is_chunk, is_taken = chunk < most_chunks, chunk < taken
    length = tl.load(length_ptr + pool_rows, mask=is_taken, other=0)
    ready = tl.where(length < tl.load(allow_ptr + pool_rows, mask=is_taken, other=0), _RUNNING_STATE, _HELD_STATE)
    end = starts + sizes
    tl.store(cached_ptr + pool_rows, end, mask=is_taken)
    tl.store(state_ptr + pool_rows, ready.to(tl.int8), mask=is_taken & (end == length - 1))
    tl.store(pool_rows_ptr + chunk, pool_rows, mask=is_chunk)
    tl.store(starts_ptr + chunk, starts, mask=is_chunk)
    tl.store(sizes_ptr + chunk, sizes, mask=is_chunk)
    tl.store(first_ptr + chunk, tl.cumsum(sizes, 0) - sizes, mask=is_chunk)
    tl.store(count_ptr, taken)
    tl.store(total_ptr, total)
    tl.store(reserved_sessions_ptr, taken)


def pack_chunks(pool: Pool, selection: Selection, chunks: Chunks, packed: Packed) -> None:
    """Write the chunks' rows behind the verified ones, a session for each chunk, and end their reservation.

    Args:
        pool: read.
        selection: what `select` found while `take_chunks` had reserved sessions; `reserved_sessions` is 0 then.
        chunks: of the round.
        packed: after `pack`; its padding is overwritten as far as there are chunks.

    Raises:
        ValueError: something on another device, or `packed` without room for the most chunks.
    """
    check_place("packed", packed.tokens, pool.device, "pool")
    check_place("chunks", chunks.count, pool.device, "pool")
    check_at_least("extra_rows of packed", packed.extra_rows, chunks.most_rows)
    check_at_least("sessions of packed", packed.pool_rows.shape[0], chunks.pool_rows.shape[0])
    if uses_triton(packed.tokens):
        _launch_packing(pool, selection, chunks, packed)
    else:
        pack_chunks_reference(pool, selection, chunks, packed)


def pack_chunks_reference(pool: Pool, selection: Selection, chunks: Chunks, packed: Packed) -> None:
    """`pack_chunks` on a CPU, one chunk after the other."""
    _pack_chunks(pool.arrays, selection.arrays, chunks.arrays, packed.arrays)


@compiled
def _pack_chunks(pool_arrays: Any, selection_arrays: Any, chunk_arrays: Any, arrays: Any) -> None:
    pool, selection = PoolArrays(*pool_arrays), SelectionArrays(*selection_arrays)
    chunks, packed = ChunksArrays(*chunk_arrays), PackedArrays(*arrays)
    at, session = selection.totals[0], selection.totals[1]
    for chunk in range(chunks.count[0]):
        row, start = chunks.pool_rows[chunk], chunks.starts[chunk]
        end = start + chunks.sizes[chunk]
        packed.pool_rows[session], packed.query_start[session] = row, at
        packed.tree_start[session] = packed.key_len[session] = end
        for index in range(start, end):
            packed.tokens[at], packed.positions[at] = pool.history[row, index], index
            packed.slots[at], packed.entries[at] = pool.table[row, index], COMMITTED
            packed.parents[at] = at - 1 if index > start else -1
            packed.sessions[at], packed.prefix_len[at] = session, index + 1
            at += 1
        session += 1
    for number in range(session, len(packed.query_start)):
        packed.query_start[number] = at
    selection.reserved_sessions[0] = 0


def _launch_packing(pool: Pool, selection: Selection, chunks: Chunks, packed: Packed) -> None:
    _pack_chunks_kernel[(triton.cdiv(chunks.most_rows, _ROWS),)](
        chunks.count,
        chunks.pool_rows,
        chunks.starts,
        chunks.sizes,
        chunks.first,
        chunks.total,
        selection.totals,
        selection.reserved_sessions,
        pool.history,
        pool.table,
        packed.tokens,
        packed.positions,
        packed.slots,
        packed.entries,
        packed.parents,
        packed.sessions,
        packed.prefix_len,
        packed.pool_rows,
        packed.query_start,
        packed.tree_start,
        packed.key_len,
        packed.pool_rows.shape[0],
        pool.max_len,
        pool.table.shape[1],
        BLOCK_N=triton.next_power_of_2(chunks.pool_rows.shape[0]),
        BLOCK_SESSIONS=triton.next_power_of_2(packed.pool_rows.shape[0] + 1),
        BLOCK=_ROWS,
        num_warps=4,
        **early_options(pool.device),
    )


@jit(do_not_specialize=["places", "max_len", "table_width"])
def _pack_chunks_kernel(
    count_ptr,  # [1] int32
    chunk_rows_ptr,  # [N_c] int32
    starts_ptr,  # [N_c] int32
    sizes_ptr,  # [N_c] int32
    first_ptr,  # [N_c] int32
    total_ptr,  # [1] int32
    totals_ptr,  # [2] int32
    reserved_sessions_ptr,  # [1] int32
    history_ptr,  # [S, max_len] int32
    table_ptr,  # [S, table_width] int32
    tokens_ptr,  # [R] int32
    positions_ptr,  # [R] int32
    slots_ptr,  # [R] int32
    entries_ptr,  # [R] int32
    parents_ptr,  # [R] int32
    sessions_ptr,  # [R] int32
    prefix_len_ptr,  # [R] int32
    pool_rows_ptr,  # [N] int32
    query_start_ptr,  # [N + 1] int32
    tree_start_ptr,  # [N] int32
    key_len_ptr,  # [N] int32
    places,
    max_len,
    table_width,
    BLOCK_N: tl.constexpr,
    BLOCK_SESSIONS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    # A program is a block of rows. The forward pass reads these arrays before its `gdc_wait`: no
    # `gdc_launch_dependents` here.
    if EARLY:
        tl.extra.cuda.gdc_wait()
    count, total = tl.load(count_ptr), tl.load(total_ptr)
    verified_rows, verified_sessions = tl.load(totals_ptr), tl.load(totals_ptr + 1)
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = number < total
    chunk = tl.arange(0, BLOCK_N)
    first = tl.load(first_ptr + chunk, mask=chunk < count, other=2**31 - 1)
    mine = tl.sum((first[None, :] <= number[:, None]).to(tl.int32), 1) - 1
    row = tl.load(chunk_rows_ptr + mine, mask=is_row, other=0).to(tl.int64)
    behind_first = number - tl.load(first_ptr + mine, mask=is_row, other=0)
    index = tl.load(starts_ptr + mine, mask=is_row, other=0) + behind_first
    at = verified_rows + number
    tl.store(tokens_ptr + at, tl.load(history_ptr + row * max_len + index, mask=is_row), mask=is_row)
    tl.store(positions_ptr + at, index, mask=is_row)
    tl.store(slots_ptr + at, tl.load(table_ptr + row * table_width + index, mask=is_row), mask=is_row)
    tl.store(entries_ptr + at, tl.full((BLOCK,), _COMMITTED, tl.int32), mask=is_row)
    tl.store(parents_ptr + at, tl.where(behind_first > 0, at - 1, -1), mask=is_row)
    tl.store(sessions_ptr + at, verified_sessions + mine, mask=is_row)
    tl.store(prefix_len_ptr + at, index + 1, mask=is_row)
    if tl.program_id(0) == 0:
        chunk_of = tl.arange(0, BLOCK_SESSIONS)
        session = verified_sessions + chunk_of
        is_chunk = chunk_of < count
        start = tl.load(first_ptr + chunk_of, mask=is_chunk, other=0)
        tl.store(query_start_ptr + session, verified_rows + tl.where(is_chunk, start, total), mask=session <= places)
        end = tl.load(starts_ptr + chunk_of, mask=is_chunk, other=0)
        end += tl.load(sizes_ptr + chunk_of, mask=is_chunk, other=0)
        tl.store(pool_rows_ptr + session, tl.load(chunk_rows_ptr + chunk_of, mask=is_chunk), mask=is_chunk)
        tl.store(tree_start_ptr + session, end, mask=is_chunk)
        tl.store(key_len_ptr + session, end, mask=is_chunk)
        tl.store(reserved_sessions_ptr, tl.zeros((), tl.int32))
