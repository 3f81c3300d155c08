"""A round's report: what it committed, how far each session has come and when its stages ran.

    counts      int64 words: see `RoundCounts`
    columns     int32 words: of each session of the step its `ReportColumn` values, then the tokens that it committed
                and its accepted nodes (`Walks.accepted`), as many as there are

The report is written into the host's memory; `publish_report` makes it valid.

Shapes: N sessions of the largest step, M rows of a session at most, and as in `outrider.kernels.pool.columns`.
"""

# compile-time parameters of kernels are upper case
# ruff: noqa: N803

from __future__ import annotations

import enum
import time

import numpy as np
import torch

from outrider.kernels.backend import jit, tl, triton, uses_triton
from outrider.kernels.pool.columns import Pool, RowState
from outrider.kernels.pool.pack import Packed
from outrider.kernels.pool.rings import REPORT_HEADER, device_time
from outrider.kernels.pool.select import Selection
from outrider.kernels.verification.walk import Walks

__all__ = [
    "ReportColumn",
    "RoundCounts",
    "RoundTime",
    "mark_time",
    "report_round",
    "report_round_reference",
    "round_words",
]


class RoundTime(enum.IntEnum):
    """Moments of a round, in nanoseconds on the device's clock."""

    BEGAN = 0
    PACKED = 1
    FORWARDED = 2
    WALKED = 3
    ENDED = 4


class RoundCounts(enum.IntEnum):
    """Words of a report before its columns, behind the `RoundTime` values."""

    ROWS = len(RoundTime)
    """Verified rows."""
    SESSIONS = len(RoundTime) + 1
    """Sessions with verified rows."""
    CHUNKS = len(RoundTime) + 2
    """Prefill chunks."""
    RUNNABLE = len(RoundTime) + 3
    """Sessions that the next round can verify."""


class ReportColumn(enum.IntEnum):
    """Columns of a report, one value for each session of the step and each prefill chunk behind them."""

    POOL_ROW = 0
    GENERATION = 1
    TOKENS = 2
    """Tokens that it committed; 0 for a chunk."""
    ACCEPTED = 3
    """Nodes among them."""
    ROWS = 4
    """Rows in the step; of a chunk, those of the prompt."""
    FINISH = 5
    """A `Finish`."""
    STATE = 6
    """A `RowState`, after the round."""
    LENGTH = 7
    CACHED = 8
    LOST = 9
    """Bit set over places whose growth has been lost."""
    SELECTED = 10
    """`Walks.selected`: verified nodes by kind of drafter; 0 for a chunk."""
    TREE_END = 11
    """A `TreeEnd`; 0 for a chunk."""


_COUNTS = max(RoundCounts) + 1
_COLUMNS = len(ReportColumn)
_HEADER = tl.constexpr(REPORT_HEADER)
_NUM_COUNTS = tl.constexpr(_COUNTS)
_NUM_TIMES = tl.constexpr(len(RoundTime))
_NUM_COLUMNS = tl.constexpr(_COLUMNS)
_ENDED = tl.constexpr(int(RoundTime.ENDED))
_RUNNING = tl.constexpr(int(RowState.RUNNING))


def round_words(sessions: int, most: int) -> int:
    """Return the int64 words of a report with room for N = `sessions` and M = `most`."""
    return _COUNTS + (sessions * (_COLUMNS + 2 * most) + 1) // 2


def mark_time(times: torch.Tensor, moment: RoundTime) -> None:
    """Write the present time.

    Args:
        times: [5] int64 by `RoundTime`, on the device.
        moment: which of them.
    """
    if uses_triton(times):
        _mark_time_kernel[(1,)](times, MOMENT=int(moment), num_warps=1)
    else:
        times.numpy()[moment] = time.perf_counter_ns()


@jit
def _mark_time_kernel(times_ptr, MOMENT: tl.constexpr):
    tl.store(times_ptr + MOMENT, device_time())


def report_round(
    pool: Pool,
    selection: Selection,
    packed: Packed,
    walks: Walks,
    num_chunks: torch.Tensor,
    times: torch.Tensor,
    reports: torch.Tensor,
    rounds: torch.Tensor,
) -> None:
    """Write the round's report into the host's buffer of this round; the last stage before `publish_report`.

    Args:
        pool: after `re_root`.
        selection: of the round.
        packed: the step.
        walks: what `walk` wrote.
        num_chunks: [1] int32, prefill chunks of the step.
        times: [5] int64 by `RoundTime`; the end is taken here.
        reports: [2, 2 + words] int64, the host's, with `round_words` words.
        rounds: [1] int64, rounds reported.
    """
    if not uses_triton(times):
        report_round_reference(pool, selection, packed, walks, num_chunks, times, reports, rounds)
        return
    sessions, most = walks.accepted.shape
    _report_round_kernel[(packed.pool_rows.shape[0],)](
        pool.state,
        pool.generation,
        pool.length,
        pool.cached,
        pool.lost,
        pool.end,
        pool.allow,
        pool.table_len,
        selection.totals,
        packed.pool_rows,
        packed.query_start,
        walks.tokens,
        walks.num_tokens,
        walks.accepted,
        walks.num_accepted,
        walks.finish,
        walks.selected,
        walks.tree_ends,
        num_chunks,
        times,
        reports,
        rounds,
        sessions,
        most,
        STRIDE=reports.shape[1],
        S=pool.sessions,
        BLOCK_S=triton.next_power_of_2(pool.sessions),
        D=pool.places,
        BLOCK_M=triton.next_power_of_2(most),
        num_warps=1,
    )


def report_round_reference(
    pool: Pool,
    selection: Selection,
    packed: Packed,
    walks: Walks,
    num_chunks: torch.Tensor,
    times: torch.Tensor,
    reports: torch.Tensor,
    rounds: torch.Tensor,
) -> None:
    """`report_round` in numpy, on a CPU."""
    sessions, most = walks.accepted.shape
    report = reports.numpy()[int(rounds.numpy()[0]) % len(reports), REPORT_HEADER:]
    verified, chunks = int(selection.totals.numpy()[1]), int(num_chunks.numpy()[0])
    count = verified + chunks
    length, state = pool.length.numpy(), pool.state.numpy()
    times.numpy()[RoundTime.ENDED] = time.perf_counter_ns()
    report[: len(RoundTime)] = times.numpy()
    report[RoundCounts.ROWS] = selection.totals.numpy()[0]
    report[RoundCounts.SESSIONS], report[RoundCounts.CHUNKS] = verified, chunks
    limit = np.minimum(pool.end.numpy(), pool.allow.numpy())
    has_slot = pool.table_len.numpy() >= length
    report[RoundCounts.RUNNABLE] = np.count_nonzero((state == RowState.RUNNING) & (length < limit) & has_slot)
    words = report[_COUNTS:].view(np.int32)
    rows = packed.pool_rows.numpy()[:count]
    is_chunk = np.arange(count) >= verified
    num_tokens = np.where(is_chunk, 0, walks.num_tokens.numpy()[rows])
    lost = (pool.lost.numpy()[rows] << np.arange(pool.places)).sum(1)
    columns = {
        ReportColumn.POOL_ROW: rows,
        ReportColumn.GENERATION: pool.generation.numpy()[rows],
        ReportColumn.TOKENS: num_tokens,
        ReportColumn.ACCEPTED: np.where(is_chunk, 0, walks.num_accepted.numpy()[:count]),
        ReportColumn.ROWS: np.diff(packed.query_start.numpy()[: count + 1]),
        ReportColumn.FINISH: np.where(is_chunk, 0, walks.finish.numpy()[:count]),
        ReportColumn.STATE: state[rows],
        ReportColumn.LENGTH: length[rows],
        ReportColumn.CACHED: pool.cached.numpy()[rows],
        ReportColumn.LOST: lost,
        ReportColumn.SELECTED: np.where(is_chunk, 0, walks.selected.numpy()[:count]),
        ReportColumn.TREE_END: np.where(is_chunk, 0, walks.tree_ends.numpy()[rows]),
    }
    for column, values in columns.items():
        words[column * sessions : column * sessions + count] = values
    begin = _COLUMNS * sessions
    tokens = words[begin : begin + sessions * most].reshape(sessions, most)
    accepted = words[begin + sessions * most : begin + 2 * sessions * most].reshape(sessions, most)
    tokens[:verified] = walks.tokens.numpy()[rows[:verified]]
    accepted[:verified] = walks.accepted.numpy()[:verified]


@jit(do_not_specialize=["sessions", "most"])
def _report_round_kernel(
    state_ptr,  # [S] int8
    generation_ptr,  # [S] int32
    length_ptr,  # [S] int32
    cached_ptr,  # [S] int32
    lost_ptr,  # [S, D] bool
    end_ptr,  # [S] int32
    allow_ptr,  # [S] int32
    table_len_ptr,  # [S] int32
    totals_ptr,  # [2] int32
    pool_rows_ptr,  # [N'] int32
    query_start_ptr,  # [N' + 1] int32
    tokens_ptr,  # [S, most] int32
    num_tokens_ptr,  # [S] int32
    accepted_ptr,  # [sessions, most] int32
    num_accepted_ptr,  # [sessions] int32
    finish_ptr,  # [sessions] int32
    selected_ptr,  # [sessions] int32
    tree_ends_ptr,  # [S] int32
    num_chunks_ptr,  # [1] int32
    times_ptr,  # [5] int64
    reports_ptr,  # [2, STRIDE] int64, the host's
    rounds_ptr,  # [1] int64
    sessions,
    most,
    STRIDE: tl.constexpr,
    S: tl.constexpr,
    BLOCK_S: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    report = reports_ptr + (tl.load(rounds_ptr) % 2) * STRIDE + _HEADER
    number = tl.program_id(0)
    verified, chunks = tl.load(totals_ptr + 1), tl.load(num_chunks_ptr)
    if number == 0:
        moment = tl.arange(0, 8)
        tl.store(report + moment, tl.load(times_ptr + moment, mask=moment < _ENDED), mask=moment < _ENDED)
        tl.store(report + _NUM_TIMES, tl.load(totals_ptr).to(tl.int64))
        tl.store(report + _NUM_TIMES + 1, verified.to(tl.int64))
        tl.store(report + _NUM_TIMES + 2, chunks.to(tl.int64))
        row = tl.arange(0, BLOCK_S)
        here = row < S
        limit = tl.minimum(tl.load(end_ptr + row, mask=here, other=0), tl.load(allow_ptr + row, mask=here, other=0))
        length = tl.load(length_ptr + row, mask=here, other=0)
        runs = (tl.load(state_ptr + row, mask=here, other=0) == _RUNNING) & (length < limit)
        runs &= tl.load(table_len_ptr + row, mask=here, other=0) >= length
        tl.store(report + _NUM_TIMES + 3, tl.sum((here & runs).to(tl.int64)))
        tl.store(report + _ENDED, device_time())
    if number < verified + chunks:
        row = tl.load(pool_rows_ptr + number)
        words = (report + _NUM_COUNTS).to(tl.pointer_type(tl.int32))
        column = words + number
        is_verified = number < verified
        num_tokens = tl.where(is_verified, tl.load(num_tokens_ptr + row), 0)
        num_accepted = tl.load(num_accepted_ptr + number, mask=is_verified, other=0)
        place = tl.arange(0, D)
        lost = tl.load(lost_ptr + row * D + place).to(tl.int32)
        tl.store(column, row)
        tl.store(column + sessions, tl.load(generation_ptr + row))
        tl.store(column + 2 * sessions, num_tokens)
        tl.store(column + 3 * sessions, num_accepted)
        rows = tl.load(query_start_ptr + number + 1) - tl.load(query_start_ptr + number)
        tl.store(column + 4 * sessions, rows)
        tl.store(column + 5 * sessions, tl.load(finish_ptr + number, mask=is_verified, other=0))
        tl.store(column + 6 * sessions, tl.load(state_ptr + row).to(tl.int32))
        tl.store(column + 7 * sessions, tl.load(length_ptr + row))
        tl.store(column + 8 * sessions, tl.load(cached_ptr + row))
        tl.store(column + 9 * sessions, tl.sum(tl.where(lost != 0, 1, 0) << place))
        tl.store(column + 10 * sessions, tl.load(selected_ptr + number, mask=is_verified, other=0))
        tl.store(column + 11 * sessions, tl.load(tree_ends_ptr + row, mask=is_verified, other=0))
        index = tl.arange(0, BLOCK_M)
        wide = words + _NUM_COLUMNS * sessions + number * most + index
        token = tl.load(tokens_ptr + row * most + index, mask=index < num_tokens, other=0)
        tl.store(wide, token, mask=index < num_tokens)
        node = tl.load(accepted_ptr + number * most + index, mask=index < num_accepted, other=0)
        tl.store(wide + sessions * most, node, mask=index < num_accepted)
