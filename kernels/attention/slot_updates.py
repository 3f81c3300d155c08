"""Slot preparation before the first layer of a forward pass.

    gather_slot_rows     out[s, :key_len[s]] = table[rows[s], :key_len[s]]
    store_positions      slot_positions[write_slots[t]] = positions[t]
    gather_paths         paths[t] = the slots of the keys that the bits of tree_mask[t] name, in their order

An entry that points outside its tensor is left out: padding of a static number of entries uses -1, or a scratch row.
These launches do not let the next one begin early: attention may read what they write before it waits
(`outrider.kernels.early_launch`).

Shapes: S sessions of the step, T rows, W mask words.
"""

# compile-time parameters of kernels are upper case
# ruff: noqa: N803

from __future__ import annotations

import torch

from outrider.kernels.argument_checks import INDEX_DTYPES, check_tensors
from outrider.kernels.backend import jit, tl, triton, uses_triton

__all__ = [
    "gather_paths",
    "gather_paths_reference",
    "gather_slot_rows",
    "gather_slot_rows_reference",
    "store_positions",
    "store_positions_reference",
]

_INT32 = (torch.int32,)
# Entries that a program copies at a time.
_BLOCK = 1024
# Entries that a program writes one by one.
_ENTRIES = 256
# Programs that share out the rows of a gather: about two for a multiprocessor.
_PROGRAMS = 256


def gather_slot_rows(table: torch.Tensor, rows: torch.Tensor, key_len: torch.Tensor, out: torch.Tensor) -> None:
    """Copy the slots of a step's sessions from the table; what lies past a session's keys keeps its contents.

    Args:
        table: [all rows, len] int32.
        rows: [S] int32 or int64, the sessions' rows of the table; a row out of range copies nothing.
        key_len: [S] int32 or int64, how many entries of each row.
        out: [S, max_len] int32, written.

    Raises:
        ValueError: a shape, dtype or device that does not fit, naming the argument.
    """
    check_tensors(
        table=(table, ("rows", "len"), _INT32),
        rows=(rows, ("S",), INDEX_DTYPES),
        key_len=(key_len, ("S",), INDEX_DTYPES),
        out=(out, ("S", "max_len"), _INT32),
    )
    sessions = rows.shape[0]
    most = min(table.shape[1], out.shape[1])
    if not uses_triton(table):
        gather_slot_rows_reference(table, rows, key_len, out)
    elif sessions and most and table.shape[0]:
        programs = min(triton.cdiv(most, _BLOCK), max(_PROGRAMS // sessions, 1))
        _gather_slot_rows_kernel[(sessions, programs)](
            out,
            table,
            rows.contiguous(),
            key_len.contiguous(),
            *out.stride(),
            *table.stride(),
            table.shape[0],
            most,
            BLOCK=_BLOCK,
            num_warps=4,
        )


def gather_slot_rows_reference(
    table: torch.Tensor, rows: torch.Tensor, key_len: torch.Tensor, out: torch.Tensor
) -> None:
    """`gather_slot_rows` in plain torch, session by session."""
    most = min(table.shape[1], out.shape[1])
    for session, (row, keys) in enumerate(zip(rows.tolist(), key_len.tolist(), strict=True)):
        if 0 <= row < table.shape[0]:
            count = min(max(keys, 0), most)
            out[session, :count] = table[row, :count]


@jit
def _gather_slot_rows_kernel(
    out_ptr,  # [S, max_len] int32
    table_ptr,  # [all rows, len] int32
    rows_ptr,  # [S] int
    key_len_ptr,  # [S] int
    out_row_stride,
    out_stride,
    table_row_stride,
    table_stride,
    all_rows,
    most,
    BLOCK: tl.constexpr,
):
    session = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + session).to(tl.int64)
    keys = tl.minimum(tl.load(key_len_ptr + session).to(tl.int64), most).to(tl.int32)
    if (row < 0) | (row >= all_rows):
        keys = 0
    table_ptr += row * table_row_stride
    out_ptr += session * out_row_stride
    for begin in range(tl.program_id(1) * BLOCK, keys, tl.num_programs(1) * BLOCK):
        index = (begin + tl.arange(0, BLOCK)).to(tl.int64)
        slot = tl.load(table_ptr + index * table_stride, mask=index < keys, other=0)
        tl.store(out_ptr + index * out_stride, slot, mask=index < keys)


def store_positions(slot_positions: torch.Tensor, write_slots: torch.Tensor, positions: torch.Tensor) -> None:
    """Note which position the token in each written slot has; sliding windows ask for it.

    Args:
        slot_positions: [num_slots] int32, written.
        write_slots: [T] int32 or int64; a slot out of range notes nothing.
        positions: [T] int32 or int64.

    Raises:
        ValueError: a shape, dtype or device that does not fit, naming the argument.
    """
    check_tensors(
        slot_positions=(slot_positions, ("num_slots",), _INT32),
        write_slots=(write_slots, ("T",), INDEX_DTYPES),
        positions=(positions, ("T",), INDEX_DTYPES),
    )
    if not uses_triton(slot_positions):
        store_positions_reference(slot_positions, write_slots, positions)
    elif write_slots.numel():
        _store_positions_kernel[(triton.cdiv(write_slots.shape[0], _ENTRIES),)](
            slot_positions,
            write_slots.contiguous(),
            positions.contiguous(),
            slot_positions.stride(0),
            slot_positions.shape[0],
            write_slots.shape[0],
            BLOCK=_ENTRIES,
            num_warps=4,
        )


def store_positions_reference(slot_positions: torch.Tensor, write_slots: torch.Tensor, positions: torch.Tensor) -> None:
    """`store_positions` in plain torch, on any device."""
    kept = (write_slots >= 0) & (write_slots < slot_positions.shape[0])
    slot_positions[write_slots[kept].long()] = positions[kept].to(slot_positions.dtype)


@jit
def _store_positions_kernel(
    slot_positions_ptr,  # [num_slots] int32
    write_slots_ptr,  # [T] int
    positions_ptr,  # [T] int
    stride,
    num_slots,
    rows,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(write_slots_ptr + row, mask=row < rows, other=-1).to(tl.int64)
    position = tl.load(positions_ptr + row, mask=row < rows, other=0).to(tl.int32)
    tl.store(slot_positions_ptr + slot * stride, position, mask=(slot >= 0) & (slot < num_slots))


def gather_paths(
    slot_table: torch.Tensor,
    sessions: torch.Tensor,
    tree_start: torch.Tensor,
    key_len: torch.Tensor,
    tree_mask: torch.Tensor,
    paths: torch.Tensor,
) -> None:
    """Write the slots of each row's keys in its tree one after the other, root first: `TreeAttentionBatch.paths`.

    Args:
        slot_table: [S, max_len] int32, the slots of each session's keys.
        sessions: [T] int32, each row's session; a row out of range has no path.
        tree_start: [S] int32, the key that bit 0 stands for.
        key_len: [S] int32, keys of each session: bits beyond them count for nothing.
        tree_mask: [T, W] int64, in whose bits ancestors come before their descendants.
        paths: [T, 64 W] int32, written; -1 behind a path's end.

    Raises:
        ValueError: a shape, dtype, device or layout that does not fit, naming the argument.
    """
    check_tensors(
        slot_table=(slot_table, ("S", "max_len"), _INT32),
        tree_mask=(tree_mask, ("T", "W"), (torch.int64,)),
        sessions=(sessions, ("T",), _INT32),
        tree_start=(tree_start, ("S",), _INT32),
        key_len=(key_len, ("S",), _INT32),
        paths=(paths, ("T", 64 * tree_mask.shape[-1]), _INT32),
    )
    rows, words = tree_mask.shape
    columns = {"tree_mask": tree_mask, "sessions": sessions, "tree_start": tree_start, "key_len": key_len}
    for name, tensor in {**columns, "paths": paths}.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: strides {tensor.stride()} given, a contiguous tensor needed")
    if not uses_triton(slot_table):
        gather_paths_reference(slot_table, sessions, tree_start, key_len, tree_mask, paths)
    elif paths.numel():
        _gather_paths_kernel[(rows,)](
            paths,
            slot_table,
            sessions,
            tree_start,
            key_len,
            tree_mask,
            *slot_table.stride(),
            *slot_table.shape,
            WORDS=words,
            BLOCK=triton.next_power_of_2(64 * words),
            num_warps=1 if words == 1 else 4,
        )


def gather_paths_reference(
    slot_table: torch.Tensor,
    sessions: torch.Tensor,
    tree_start: torch.Tensor,
    key_len: torch.Tensor,
    tree_mask: torch.Tensor,
    paths: torch.Tensor,
) -> None:
    """`gather_paths` in plain torch, row by row."""
    paths.fill_(-1)
    count, most = slot_table.shape
    for row, session in enumerate(sessions.tolist()):
        if 0 <= session < count:
            bits = (tree_mask[row][:, None] >> torch.arange(64, device=tree_mask.device) & 1).flatten()
            keys = bits.nonzero().squeeze(1) + tree_start[session]
            keys = keys[keys < min(int(key_len[session]), most)]
            paths[row, : len(keys)] = slot_table[session, keys]


@jit(do_not_specialize=["sessions", "max_len"])
def _gather_paths_kernel(
    paths_ptr,  # [T, 64 WORDS] int32
    table_ptr,  # [S, max_len] int32
    sessions_ptr,  # [T] int32
    tree_start_ptr,  # [S] int32
    key_len_ptr,  # [S] int32
    tree_mask_ptr,  # [T, WORDS] int64
    table_row_stride,
    table_stride,
    sessions,
    max_len,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    session = tl.load(sessions_ptr + row)
    is_row = (session >= 0) & (session < sessions)
    start = tl.load(tree_start_ptr + session, mask=is_row, other=0)
    keys = tl.minimum(tl.load(key_len_ptr + session, mask=is_row, other=0), max_len)
    bit = tl.arange(0, BLOCK)
    word = tl.load(tree_mask_ptr + row * WORDS + (bit >> 6), mask=bit < 64 * WORDS, other=0)
    key = start + bit
    is_on_path = (((word >> (bit & 63).to(tl.int64)) & 1) != 0) & (key >= 0) & (key < keys)
    slot = tl.load(
        table_ptr + session.to(tl.int64) * table_row_stride + key.to(tl.int64) * table_stride, mask=is_on_path, other=-1
    )
    place, count = tl.cumsum(is_on_path.to(tl.int32), 0) - 1, tl.sum(is_on_path.to(tl.int32))
    paths_ptr += row * (64 * WORDS)
    tl.store(paths_ptr + place, slot, mask=is_on_path)
    tl.store(paths_ptr + bit, tl.full((BLOCK,), -1, tl.int32), mask=(bit >= count) & (bit < 64 * WORDS))
