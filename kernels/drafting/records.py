"""Records that pass between a target's pool and the pool of a drafter beside it, on the device of both.

    follow_records    the records of a target's round, as the drafter's pool takes them
    growth_records    the nodes of a growth step, as records of growth for the target's pool

Both pools have the same rows, and rows are opened and closed in both by the same records, with the same generations. A
drafter's pool has no use for the KV slots of the target's rows, nor for what others have grown:

    OPEN      if its session is drafted: `cached` 0, `end` at most the drafter's longest session
    CLOSE     as it is
    LIMITS    `end` likewise
    FORGET    of the drafter's place in the target's pool: of the drafter's only place
    others    NOTHING

`outrider.kernels.pool.graft` drops what it reads of rows that OPEN has left closed.

Shapes: G records of a round, S rows of both pools, R rows of a growth step, L of them that bring children, K children.
"""

# compile-time parameters of kernels are upper case
# ruff: noqa: N803

from __future__ import annotations

import numpy as np
import torch

from outrider.kernels.argument_checks import check_dtype, check_place
from outrider.kernels.backend import check_shape, jit, tl, triton, uses_triton
from outrider.kernels.pool.columns import Pool
from outrider.kernels.pool.records import WORDS, RecordKind
from outrider.kernels.sampling.rows import SampledRows

__all__ = ["follow_records", "follow_records_reference", "growth_records", "growth_records_reference"]

_WORDS = tl.constexpr(WORDS)
_GROWTH = tl.constexpr(int(RecordKind.GROWTH))
_OPEN = tl.constexpr(int(RecordKind.OPEN))
_CLOSE = tl.constexpr(int(RecordKind.CLOSE))
_LIMITS = tl.constexpr(int(RecordKind.LIMITS))
_FORGET = tl.constexpr(int(RecordKind.FORGET))
# Records that a program translates.
_BLOCK = 256


def follow_records(
    records: torch.Tensor, count: torch.Tensor, is_drafted: torch.Tensor, out: torch.Tensor, *, place: int, longest: int
) -> None:
    """Translate the records of a target's round for the pool of a drafter beside it.

    Args:
        records: [G, 8] int32, as the target's `graft` has taken them.
        count: [1] int32: how many.
        is_drafted: [S] int32: 0 for rows whose session the drafter leaves alone.
        out: [G, 8] int32, written up to `count`.
        place: of the drafter in the target's pool.
        longest: most tokens of a session of the drafter.

    Raises:
        ValueError: a shape, dtype or device that does not fit, naming the argument.
    """
    check_shape("records", records, ("G", WORDS))
    check_shape("out", out, (records.shape[0], WORDS))
    check_shape("count", count, (1,))
    for name, tensor in (("records", records), ("count", count), ("is_drafted", is_drafted), ("out", out)):
        check_dtype(name, tensor, (torch.int32,))
        check_place(name, tensor, records.device, "records")
    if not uses_triton(records):
        follow_records_reference(records, count, is_drafted, out, place=place, longest=longest)
        return
    _follow_records_kernel[(triton.cdiv(records.shape[0], _BLOCK),)](
        records, count, is_drafted, out, is_drafted.shape[0], place, longest, BLOCK=_BLOCK, num_warps=4
    )


def follow_records_reference(
    records: torch.Tensor, count: torch.Tensor, is_drafted: torch.Tensor, out: torch.Tensor, *, place: int, longest: int
) -> None:
    """`follow_records` in numpy, on a CPU."""
    used = int(count.numpy()[0])
    if not used:
        return
    words, drafted, found = records.numpy()[:used], is_drafted.numpy(), out.numpy()
    kind, row = words[:, 0] & 0xFF, words[:, 1]
    is_row = (row >= 0) & (row < len(drafted))
    is_open = (kind == RecordKind.OPEN) & is_row & (drafted[np.where(is_row, row, 0)] != 0)
    is_limits = kind == RecordKind.LIMITS
    is_own = (kind == RecordKind.FORGET) & (words[:, 0] >> 8 & 0xFF == place)
    found[:used] = words
    found[:used, 0] = np.where(is_open | is_limits | is_own | (kind == RecordKind.CLOSE), kind, RecordKind.NOTHING)
    found[:used, 3] = np.where(is_limits, np.minimum(words[:, 3], longest), words[:, 3])
    found[:used, 4] = np.where(is_open, 0, words[:, 4])
    found[:used, 5] = np.where(is_open, np.minimum(words[:, 5], longest), words[:, 5])


@jit(do_not_specialize=["sessions", "place", "longest"])
def _follow_records_kernel(
    records_ptr,  # [G, 8] int32
    count_ptr,  # [1] int32
    is_drafted_ptr,  # [S] int32
    out_ptr,  # [G, 8] int32
    sessions,
    place,
    longest,
    BLOCK: tl.constexpr,
):
    count, first = tl.load(count_ptr), tl.program_id(0) * BLOCK
    if first < count:
        index = first + tl.arange(0, BLOCK)
        here = index < count
        words, found = records_ptr + index * _WORDS, out_ptr + index * _WORDS
        head, row = tl.load(words, mask=here, other=0), tl.load(words + 1, mask=here, other=0)
        kind = head & 0xFF
        is_row = here & (row >= 0) & (row < sessions)
        is_open = (kind == _OPEN) & (tl.load(is_drafted_ptr + row, mask=is_row, other=0) != 0)
        is_limits = kind == _LIMITS
        is_own = (kind == _FORGET) & (((head >> 8) & 0xFF) == place)
        word_3, word_4 = tl.load(words + 3, mask=here, other=0), tl.load(words + 4, mask=here, other=0)
        word_5 = tl.load(words + 5, mask=here, other=0)
        tl.store(found, tl.where(is_open | is_limits | is_own | (kind == _CLOSE), kind, 0), mask=here)
        tl.store(found + 1, row, mask=here)
        tl.store(found + 2, tl.load(words + 2, mask=here, other=0), mask=here)
        tl.store(found + 3, tl.where(is_limits, tl.minimum(word_3, longest), word_3), mask=here)
        tl.store(found + 4, tl.where(is_open, 0, word_4), mask=here)
        tl.store(found + 5, tl.where(is_open, tl.minimum(word_5, longest), word_5), mask=here)
        tl.store(found + 6, tl.load(words + 6, mask=here, other=0), mask=here)
        tl.store(found + 7, tl.load(words + 7, mask=here, other=0), mask=here)


def growth_records(
    pool: Pool,
    rows: SampledRows,
    columns: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    records: torch.Tensor,
    count: torch.Tensor,
    *,
    place: int,
    drafter: int,
) -> None:
    """Write the nodes that a growth step has made as records of growth, in the order of their ids within a session.

    Args:
        pool: the drafter's, after `append`.
        rows: the rows that brought children.
        columns: tokens [R, K] int32, acceptances [R, K] float32, ids made [R, K] int32 (0: none) and parent ids [R]
            int32, as `append` takes and writes them.
        records: [L * K or more, 8] int32, written up to `count`.
        count: [1] int32, written: how many.
        place: of the drafter in the target's pool.
        drafter: number of its kind, 0 to 7.

    Raises:
        ValueError: a shape, dtype or device that does not fit, naming the argument.
    """
    tokens, acceptances, made, parent_ids = columns
    check_shape("tokens", tokens, ("R", "K"))
    for name, tensor in (("acceptances", acceptances), ("made", made)):
        check_shape(name, tensor, tuple(tokens.shape))
    check_shape("parent_ids", parent_ids, tokens.shape[:1])
    check_shape("records", records, ("G", WORDS))
    check_shape("count", count, (1,))
    check_dtype("acceptances", acceptances, (torch.float32,))
    ints = {"tokens": tokens, "made": made, "parent_ids": parent_ids, "records": records, "count": count}
    for name, tensor in ints.items():
        check_dtype(name, tensor, (torch.int32,))
        check_place(name, tensor, pool.device, "pool")
    lines, branching = rows.rows.shape[0], tokens.shape[1]
    if records.shape[0] < lines * branching:
        raise ValueError(f"records: room for {records.shape[0]} given, {lines * branching} needed")
    head = int(RecordKind.GROWTH) | place << 8 | 1 << drafter + 16
    if not uses_triton(tokens):
        growth_records_reference(pool, rows, columns, records, count, head)
        return
    _growth_records_kernel[(1,)](
        rows.count,
        rows.rows,
        rows.pool_rows,
        pool.length,
        pool.generation,
        tokens,
        acceptances,
        made,
        parent_ids,
        records,
        count,
        head,
        K=branching,
        BLOCK=triton.next_power_of_2(lines * branching),
        num_warps=4,
    )


def growth_records_reference(
    pool: Pool,
    rows: SampledRows,
    columns: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    records: torch.Tensor,
    count: torch.Tensor,
    head: int,
) -> None:
    """`growth_records` in numpy, on a CPU; `head` is the first word of each record."""
    tokens, acceptances, made, parent_ids = (column.numpy() for column in columns)
    used = int(rows.count.numpy()[0])
    step_rows, pool_rows = rows.rows.numpy()[:used], rows.pool_rows.numpy()[:used]
    line, child = np.nonzero(made[step_rows] > 0)
    row, pool_row = step_rows[line], pool_rows[line]
    found = records.numpy()[: len(line)]
    found[:, 0], found[:, 1], found[:, 2] = head, pool_row, pool.generation.numpy()[pool_row]
    found[:, 3], found[:, 4], found[:, 5] = made[row, child], parent_ids[row], pool.length.numpy()[pool_row]
    found[:, 6], found[:, 7] = tokens[row, child], acceptances.view(np.int32)[row, child]
    count.numpy()[0] = len(line)


@jit(do_not_specialize=["head"])
def _growth_records_kernel(
    num_lines_ptr,  # [1] int32
    rows_ptr,  # [L] int64
    pool_rows_ptr,  # [L] int32
    length_ptr,  # [S] int32
    generation_ptr,  # [S] int32
    tokens_ptr,  # [R, K] int32
    acceptances_ptr,  # [R, K] float32
    made_ptr,  # [R, K] int32
    parent_ids_ptr,  # [R] int32
    records_ptr,  # [G, 8] int32
    count_ptr,  # [1] int32
    head,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    number = tl.arange(0, BLOCK)
    line = number // K
    here = line < tl.load(num_lines_ptr)
    row = tl.load(rows_ptr + line, mask=here, other=0)
    pool_row = tl.load(pool_rows_ptr + line, mask=here, other=0)
    child = row * K + number % K
    made = tl.load(made_ptr + child, mask=here, other=0)
    is_node = made > 0
    words = records_ptr + (tl.cumsum(is_node.to(tl.int32), 0) - 1) * _WORDS
    tl.store(words, tl.zeros_like(made) + head, mask=is_node)
    tl.store(words + 1, pool_row, mask=is_node)
    tl.store(words + 2, tl.load(generation_ptr + pool_row, mask=is_node, other=0), mask=is_node)
    tl.store(words + 3, made, mask=is_node)
    tl.store(words + 4, tl.load(parent_ids_ptr + row, mask=is_node, other=0), mask=is_node)
    tl.store(words + 5, tl.load(length_ptr + pool_row, mask=is_node, other=0), mask=is_node)
    tl.store(words + 6, tl.load(tokens_ptr + child, mask=is_node, other=0), mask=is_node)
    bits = tl.load(acceptances_ptr + child, mask=is_node, other=0.0).to(tl.int32, bitcast=True)
    tl.store(words + 7, bits, mask=is_node)
    tl.store(count_ptr, tl.sum(is_node.to(tl.int32)))
