"""Children of a growth step: how likely each is accepted, and what the host is told.

    estimate_children   estimates of acceptance for children ranked under log q + G, from the calibration's tables
    report_children     the step's rows, children and counts, written to the host's memory

A child falls into a bucket of the calibration (`outrider.drafting.acceptance_calibration`) by its rank and by one
number:

    temperature 0       -log q of the child
    above               (score of the best - score of the child) * temperature; for the best child itself: the second's

    bucket = (rule * ranks + rank) * bins + how many edges are below the number
    estimate = table[bucket] / max(1, sum over the row's children)

Shapes: R rows of the step, L rows that bring children, S rows of the pool, N sessions of the step, k ranked tokens of a
row, K of them that may become nodes, E edges, T buckets of the calibration.
"""

# compile-time parameters of kernels are upper case
# ruff: noqa: N803

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from outrider.kernels.backend import jit, tl, triton, uses_triton
from outrider.kernels.compiled import compiled
from outrider.kernels.pool.columns import Pool
from outrider.kernels.pool.rings import REPORT_HEADER, device_time
from outrider.kernels.sampling.rows import SampledRows

__all__ = [
    "REPORT_COUNTS",
    "estimate_children",
    "estimate_children_reference",
    "report_children",
    "report_children_reference",
    "report_words",
]

REPORT_COUNTS = 7
"""int64 words of a report before its columns: rows, sessions, rows with children, free KV slots, begin, end of the
step in nanoseconds, committed tokens without KV that sessions wait for."""

_COUNTS = tl.constexpr(REPORT_COUNTS)
_HEADER = tl.constexpr(REPORT_HEADER)
# Scores of tokens that cannot be chosen are cut off here.
_LEAST_SCORE = -1e30
_LEAST = tl.constexpr(_LEAST_SCORE)
# Rows that a program of `estimate_children` handles.
_ROWS = 32


def estimate_children(
    tokens: torch.Tensor,
    log_q: torch.Tensor,
    scores: torch.Tensor,
    rows: SampledRows,
    tables: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    least: float,
    outputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """Estimate how likely each ranked child is accepted, and choose those that become nodes.

    Args:
        tokens: [L, k] int64, best first; -1 behind the last that can be chosen.
        log_q: [L, k] float32.
        scores: [L, k] float32, log q + G.
        rows: the rows, as `sample_rows` wrote them.
        tables: edges [2, E] float32, prior [T] and learned [T] float32 as of `AcceptanceCalibration`; `learned` may be
            the host's pinned memory.
        least: children of a lower estimate become no nodes.
        outputs: written. Of all ranked children: tokens [L, K] int32 and buckets [L, K] int32. For `append`, by rows of
            the step: tokens [R, K] int32, -1 for no node, and acceptances [R, K] float32.
    """
    if not uses_triton(log_q):
        estimate_children_reference(tokens, log_q, scores, rows, tables, least, outputs)
        return
    edges, prior, learned = tables
    ranked, buckets, nodes, acceptances = outputs
    lines, branching = log_q.shape[0], ranked.shape[1]
    _estimate_children_kernel[(triton.cdiv(lines, _ROWS),)](
        tokens,
        log_q,
        scores,
        rows.count,
        rows.rows,
        rows.temperature,
        rows.fixed,
        edges,
        prior,
        learned,
        ranked,
        buckets,
        nodes,
        acceptances,
        lines,
        least,
        RANKED=log_q.shape[1],
        SECOND=min(log_q.shape[1], 2) - 1,
        K=branching,
        EDGES=edges.shape[1],
        BUCKETS=prior.shape[0],
        TABLE=triton.next_power_of_2(prior.shape[0]),
        ROWS=_ROWS,
        num_warps=1,
    )


def estimate_children_reference(
    tokens: torch.Tensor,
    log_q: torch.Tensor,
    scores: torch.Tensor,
    rows: SampledRows,
    tables: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    least: float,
    outputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """`estimate_children` on a CPU, one child after the other."""
    arrays: list[Any] = [tokens, log_q, scores, rows.rows, rows.temperature, rows.fixed, *tables, *outputs]
    _estimate(tuple(array.numpy() for array in arrays), np.float32(least))


@compiled
def _estimate(arrays: Any, least: Any) -> None:
    # One tuple: numba unpacks it in half the time.
    tokens, log_q, scores, rows, temperature, fixed, edges, prior, learned, ranked, buckets, nodes, acceptances = arrays
    lines, last = log_q.shape
    branching, per_rule, bins = ranked.shape[1], len(prior) // 3, edges.shape[1] + 1
    for line in range(lines):
        heat, row = temperature[line], rows[line]
        table = prior if fixed[line] else learned
        best = max(scores[line, 0], np.float32(_LEAST_SCORE))
        total = np.float32(0)
        for rank in range(branching):
            if heat > 0:
                other = max(scores[line, 1 if rank == 0 and last > 1 else rank], np.float32(_LEAST_SCORE))
                bucket = per_rule + rank * bins + _edges_below(edges[1], (best - other) * heat)
            else:
                bucket = rank * bins + _edges_below(edges[0], -log_q[line, rank])
            ranked[line, rank], buckets[line, rank] = tokens[line, rank], bucket
            total += table[bucket]
        for rank in range(branching):
            estimate = table[buckets[line, rank]]
            if total > 1:
                estimate /= total
            is_node = ranked[line, rank] >= 0 and estimate >= least
            nodes[row, rank], acceptances[row, rank] = ranked[line, rank] if is_node else -1, estimate


@compiled
def _edges_below(edges: Any, number: float) -> int:
    """Return the number of ascending edges below a number; NaN is above all."""
    place = 0
    while place < len(edges) and not edges[place] >= number:
        place += 1
    return place


@jit(do_not_specialize=["lines", "least"])
def _estimate_children_kernel(
    tokens_ptr,  # [L, RANKED] int64
    log_q_ptr,  # [L, RANKED] float32
    scores_ptr,  # [L, RANKED] float32
    count_ptr,  # [1] int32
    rows_ptr,  # [L] int64
    temperature_ptr,  # [L] float32
    fixed_ptr,  # [L] int32
    edges_ptr,  # [2, EDGES] float32
    prior_ptr,  # [BUCKETS] float32
    learned_ptr,  # [BUCKETS] float32, perhaps the host's
    ranked_ptr,  # [L, K] int32
    buckets_ptr,  # [L, K] int32
    nodes_ptr,  # [R, K] int32
    acceptances_ptr,  # [R, K] float32
    lines,
    least,
    RANKED: tl.constexpr,
    SECOND: tl.constexpr,
    K: tl.constexpr,
    EDGES: tl.constexpr,
    BUCKETS: tl.constexpr,
    TABLE: tl.constexpr,
    ROWS: tl.constexpr,
):
    line = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = (line < lines) & (line < tl.load(count_ptr))
    # The whole tables at once: the way to the host's memory is long, and bytes on it are cheap.
    entry = tl.arange(0, TABLE)
    learned = tl.load(learned_ptr + entry, mask=entry < BUCKETS, other=0.0, volatile=True)
    prior = tl.load(prior_ptr + entry, mask=entry < BUCKETS, other=0.0)
    heat = tl.load(temperature_ptr + line, mask=here, other=0.0)
    fixed = tl.load(fixed_ptr + line, mask=here, other=0)
    row = tl.load(rows_ptr + line, mask=here, other=0)
    best = tl.maximum(tl.load(scores_ptr + line * RANKED, mask=here, other=0.0), _LEAST)
    total = tl.zeros((ROWS,), tl.float32)
    for rank in tl.static_range(K):
        compared = scores_ptr + line * RANKED + (rank if rank > 0 else SECOND)
        other = tl.maximum(tl.load(compared, mask=here, other=0.0), _LEAST)
        gap, surprise = (best - other) * heat, -tl.load(log_q_ptr + line * RANKED + rank, mask=here, other=0.0)
        bucket = tl.zeros((ROWS,), tl.int32)
        for edge in tl.static_range(EDGES):
            is_below = tl.where(
                heat > 0, tl.load(edges_ptr + EDGES + edge) >= gap, tl.load(edges_ptr + edge) >= surprise
            )
            bucket += (is_below == 0).to(tl.int32)
        bucket += rank * (EDGES + 1) + tl.where(heat > 0, BUCKETS // 3, 0)
        total += tl.where(fixed != 0, tl.gather(prior, bucket, 0), tl.gather(learned, bucket, 0))
        tl.store(buckets_ptr + line * K + rank, bucket, mask=here)
    tl.debug_barrier()
    for rank in tl.static_range(K):
        bucket = tl.load(buckets_ptr + line * K + rank, mask=here, other=0)
        estimate = tl.where(fixed != 0, tl.gather(prior, bucket, 0), tl.gather(learned, bucket, 0))
        estimate = tl.where(total > 1, tl.div_rn(estimate, total), estimate)
        token = tl.load(tokens_ptr + line * RANKED + rank, mask=here, other=-1).to(tl.int32)
        is_node = (token >= 0) & (estimate >= least)
        tl.store(ranked_ptr + line * K + rank, token, mask=here)
        tl.store(nodes_ptr + row * K + rank, tl.where(is_node, token, -1), mask=here)
        tl.store(acceptances_ptr + row * K + rank, estimate, mask=here)


def report_words(lines: int, branching: int) -> int:
    """Return the int64 words of a report with room for L = `lines` rows of K = `branching` children."""
    return REPORT_COUNTS + (lines * (3 + 4 * branching) + 1) // 2


def report_children(
    pool: Pool,
    packed_rows: torch.Tensor,
    rows: SampledRows,
    columns: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    counts: tuple[torch.Tensor, torch.Tensor],
    reports: torch.Tensor,
    rounds: torch.Tensor,
    lines: int,
) -> None:
    """Write the step's counts and columns into the host's buffer of this round; `publish_report` makes them valid.

    The columns, int32, each with room for `lines` rows: pool rows, lengths, parent ids [lines]; then tokens, buckets,
    ids of the nodes made (0: none) and float32 bits of the acceptances, [lines, K] each. Rows past the count are not
    written.

    Args:
        pool: after the step.
        packed_rows: [2] int32: rows and sessions of the step.
        rows: the rows that brought children.
        columns: tokens [L, K] int32, buckets [L, K] int32, acceptances [R, K] float32, made [R, K] int32 and parent ids
            [R] int32, as `estimate_children` and `append` wrote them.
        counts: `needed` [1] int32 of the selection and `began` [1] int64 of `take_records`.
        reports: [B, 2 + N] int64, the host's.
        rounds: [1] int64, rounds reported.
        lines: rows that the layout has room for, at least L.
    """
    tokens, buckets, acceptances, made, parent_ids = columns
    needed, began = counts
    nodes = pool.nodes
    assert nodes is not None, "the pool of a drafter"
    if not uses_triton(tokens):
        report_children_reference(pool, packed_rows, rows, columns, counts, reports, rounds, lines)
        return
    branching = tokens.shape[1]
    _report_children_kernel[(1,)](
        packed_rows,
        rows.count,
        rows.rows,
        rows.pool_rows,
        pool.length,
        nodes.free_head,
        nodes.free_tail,
        needed,
        began,
        tokens,
        buckets,
        acceptances,
        made,
        parent_ids,
        reports,
        rounds,
        lines,
        BUFFERS=reports.shape[0],
        STRIDE=reports.shape[1],
        K=branching,
        BLOCK=triton.next_power_of_2(rows.rows.shape[0] * branching),
        num_warps=4,
    )


def report_children_reference(
    pool: Pool,
    packed_rows: torch.Tensor,
    rows: SampledRows,
    columns: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    counts: tuple[torch.Tensor, torch.Tensor],
    reports: torch.Tensor,
    rounds: torch.Tensor,
    lines: int,
) -> None:
    """`report_children` in numpy, on a CPU."""
    tokens, buckets, acceptances, made, parent_ids = (column.numpy() for column in columns)
    nodes = pool.nodes
    assert nodes is not None, "the pool of a drafter"
    report = reports.numpy()[int(rounds.numpy()[0]) % len(reports), REPORT_HEADER:]
    count, branching = int(rows.count.numpy()[0]), tokens.shape[1]
    step_rows, pool_rows = rows.rows.numpy()[:count], rows.pool_rows.numpy()[:count]
    report[:REPORT_COUNTS] = (
        *packed_rows.tolist(),
        count,
        int(nodes.free_tail.numpy()[0] - nodes.free_head.numpy()[0]),
        int(counts[1].numpy()[0]),
        time.perf_counter_ns(),
        int(counts[0].numpy()[0]),
    )
    words = report[REPORT_COUNTS:].view(np.int32)
    for number, column in enumerate((pool_rows, pool.length.numpy()[pool_rows], parent_ids[step_rows])):
        words[number * lines : number * lines + count] = column
    wide = (tokens[:count], buckets[:count], made[step_rows], acceptances[step_rows].view(np.int32))
    for number, column in enumerate(wide):
        begin = (3 + number * branching) * lines
        words[begin : begin + count * branching] = column.ravel()


@jit(do_not_specialize=["lines"])
def _report_children_kernel(
    packed_rows_ptr,  # [2] int32
    count_ptr,  # [1] int32
    rows_ptr,  # [L] int64
    pool_rows_ptr,  # [L] int32
    length_ptr,  # [S] int32
    free_head_ptr,  # [1] int64
    free_tail_ptr,  # [1] int64
    needed_ptr,  # [1] int32
    began_ptr,  # [1] int64
    tokens_ptr,  # [L, K] int32
    buckets_ptr,  # [L, K] int32
    acceptances_ptr,  # [R, K] float32
    made_ptr,  # [R, K] int32
    parent_ids_ptr,  # [R] int32
    reports_ptr,  # [BUFFERS, STRIDE] int64, the host's
    rounds_ptr,  # [1] int64
    lines,
    BUFFERS: tl.constexpr,
    STRIDE: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    report = reports_ptr + (tl.load(rounds_ptr) % BUFFERS) * STRIDE + _HEADER
    count = tl.load(count_ptr)
    tl.store(report, tl.load(packed_rows_ptr).to(tl.int64))
    tl.store(report + 1, tl.load(packed_rows_ptr + 1).to(tl.int64))
    tl.store(report + 2, count.to(tl.int64))
    tl.store(report + 3, tl.load(free_tail_ptr) - tl.load(free_head_ptr))
    tl.store(report + 4, tl.load(began_ptr))
    tl.store(report + 6, tl.load(needed_ptr).to(tl.int64))
    words = (report + _COUNTS).to(tl.pointer_type(tl.int32))
    number = tl.arange(0, BLOCK)
    line = number // K
    here = line < count
    row = tl.load(rows_ptr + line, mask=here, other=0)
    first = here & (number % K == 0)
    pool_row = tl.load(pool_rows_ptr + line, mask=here, other=0)
    tl.store(words + line, pool_row, mask=first)
    tl.store(words + lines + line, tl.load(length_ptr + pool_row, mask=first, other=0), mask=first)
    tl.store(words + 2 * lines + line, tl.load(parent_ids_ptr + row, mask=first, other=0), mask=first)
    child = row * K + number % K
    words += 3 * lines + number
    tl.store(words, tl.load(tokens_ptr + number, mask=here, other=0), mask=here)
    tl.store(words + K * lines, tl.load(buckets_ptr + number, mask=here, other=0), mask=here)
    tl.store(words + 2 * K * lines, tl.load(made_ptr + child, mask=here, other=0), mask=here)
    bits = tl.load(acceptances_ptr + child, mask=here, other=0.0).to(tl.int32, bitcast=True)
    tl.store(words + 3 * K * lines, bits, mask=here)
    tl.store(report + 5, device_time())
