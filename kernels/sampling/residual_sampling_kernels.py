"""Triton side of `outrider.kernels.sampling.residual_sampling`.

The programs of a request share its row: each sums its blocks, and the one that arrives last looks the token up, first
its block by the blocks' sums, then its place in the block. The count of arrivals lives in the plan that a walk has
just written, so no state outlasts a call. A block's sum does not depend on which program made it: a row gives the same
bits wherever it stands, however many rows there are.

Shapes: bs requests, V vocabulary size, n tokens that can be excluded, blocks of V.
"""

# compile-time parameters of kernels are upper case
# ruff: noqa: N803

from __future__ import annotations

from outrider.kernels.backend import jit, tl

__all__ = ["PLAN_COLUMNS", "residual_kernel", "store_plan"]

# p's row, q's row (-1: none), place of the token in the output (-1: no token), number of excluded tokens, programs
# that have arrived, and a place for what a walk read only to have it near.
PLAN_COLUMNS = 6
_PLAN_COLUMNS = tl.constexpr(PLAN_COLUMNS)


@jit
def store_plan(columns_ptr, uniforms_ptr, request, target_row, draft_row, place, excluded, uniform):
    """Store the rows that request `request` draws from, and reset its count of arrivals."""
    columns_ptr += request * _PLAN_COLUMNS
    tl.store(columns_ptr, target_row.to(tl.int64))
    tl.store(columns_ptr + 1, draft_row.to(tl.int64))
    tl.store(columns_ptr + 2, place.to(tl.int64))
    tl.store(columns_ptr + 3, excluded.to(tl.int64))
    tl.store(columns_ptr + 4, 0)
    tl.store(uniforms_ptr + request, uniform)


@jit
def _residual_of(
    ids,
    low,
    high,
    target_ptr,
    draft_ptr,
    excluded_ptr,
    draft_row,
    excluded,
    vocab_size,
    HAS_DRAFT: tl.constexpr,
    EXCLUDED: tl.constexpr,
):
    """r of the ids in [low, high), 0 beyond V."""
    inside = ids < vocab_size
    residual = tl.load(target_ptr + ids, mask=inside, other=0.0).to(tl.float32)
    if HAS_DRAFT:
        residual -= tl.load(draft_ptr + ids, mask=inside & (draft_row >= 0), other=0.0).to(tl.float32)
    # Written so that NaN counts as nothing.
    residual = tl.where(residual > 0, residual, 0.0)
    if EXCLUDED > 0 and excluded > 0:
        # Only the few tokens that lie here are compared with every id, the smallest first.
        place = tl.arange(0, EXCLUDED)
        tokens = tl.load(excluded_ptr + place, mask=place < excluded, other=-1)
        tokens = tl.where(tokens < low, high, tokens)
        token = tl.min(tokens)
        while token < high:
            residual = tl.where(ids == token, 0.0, residual)
            token = tl.min(tl.where(tokens > token, tokens, high))
    return residual


@jit
def _token(
    uniform,
    sums_ptr,
    target_ptr,
    draft_ptr,
    excluded_ptr,
    draft_row,
    excluded,
    vocab_size,
    blocks,
    HAS_DRAFT: tl.constexpr,
    EXCLUDED: tl.constexpr,
    FALLS_BACK: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """The token of one request: first its block by the blocks' sums, then its place in the block."""
    lanes = tl.arange(0, BLOCKS)
    # .cg: other multiprocessors wrote these, the first-level cache may hold older values.
    sums = tl.load(sums_ptr + lanes, mask=lanes < blocks, other=0.0, cache_modifier=".cg")
    if FALLS_BACK and tl.sum(sums) == 0:
        # Next to never: p nowhere above q, and yet a rejection. This program sums p alone.
        draft_row = tl.full([], -1, tl.int64)
        for block in range(blocks):
            ids = block * BLOCK + tl.arange(0, BLOCK)
            residual = _residual_of(
                ids, 0, 0, target_ptr, draft_ptr, excluded_ptr, draft_row, 0, vocab_size, HAS_DRAFT, 0
            )
            tl.store(sums_ptr + block, tl.sum(residual.to(tl.float64)))
        tl.debug_barrier()
        sums = tl.load(sums_ptr + lanes, mask=lanes < blocks, other=0.0, cache_modifier=".cg")
    ends = tl.cumsum(sums, 0)
    threshold = uniform * tl.max(ends)
    first = tl.min(tl.where((sums > 0) & (ends > threshold), lanes, BLOCKS))
    last = tl.max(tl.where(sums > 0, lanes, 0))
    found = tl.where(first < BLOCKS, first, last)
    before = tl.sum(tl.where(lanes < found, sums, 0.0))
    low = found * BLOCK
    ids = low + tl.arange(0, BLOCK)
    residual = _residual_of(
        ids, low, low + BLOCK, target_ptr, draft_ptr, excluded_ptr, draft_row, excluded, vocab_size,
        HAS_DRAFT, EXCLUDED,
    )  # fmt: skip
    reached = before + tl.cumsum(residual.to(tl.float64), 0)
    token = tl.min(tl.where((residual > 0) & (reached > threshold), ids, vocab_size))
    final = tl.max(tl.where(residual > 0, ids, -1))
    return tl.where(token < vocab_size, token, tl.where(final >= 0, final, vocab_size - 1))


@jit(do_not_specialize=["programs", "steps"])
def residual_kernel(
    out_ptr,  # int32 or int64
    target_ptr,  # [bs, rows, V] float
    draft_ptr,  # [bs, rows, V] float
    columns_ptr,  # [bs, PLAN_COLUMNS] int64
    uniforms_ptr,  # [bs] float64
    excluded_ptr,  # [bs, n] int32
    sums_ptr,  # [bs, blocks] float64
    target_stride,
    target_row_stride,
    draft_stride,
    draft_row_stride,
    excluded_stride,
    vocab_size,
    blocks,
    programs,
    steps,
    HAS_DRAFT: tl.constexpr,
    EXCLUDED: tl.constexpr,
    FALLS_BACK: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Sum `steps` tiles of GROUP blocks of a request's row, and draw its token if that were the last ones."""
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
    request = (tl.program_id(0) // programs).to(tl.int64)
    first_block = tl.program_id(0) % programs * steps * GROUP
    columns_ptr += request * _PLAN_COLUMNS
    target_row, draft_row = tl.load(columns_ptr), tl.load(columns_ptr + 1)
    place, excluded = tl.load(columns_ptr + 2), tl.load(columns_ptr + 3)
    if place >= 0:
        target_ptr += request * target_stride + target_row * target_row_stride
        draft_ptr += request * draft_stride + tl.maximum(draft_row, 0) * draft_row_stride
        excluded_ptr += request * excluded_stride
        sums_ptr += request * blocks
        for step in range(steps):
            block = first_block + step * GROUP + tl.arange(0, GROUP)
            low = (first_block + step * GROUP) * BLOCK
            ids = low + tl.arange(0, GROUP)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
            residual = _residual_of(
                ids, low, low + GROUP * BLOCK, target_ptr, draft_ptr, excluded_ptr, draft_row, excluded, vocab_size,
                HAS_DRAFT, EXCLUDED,
            )  # fmt: skip
            tl.store(sums_ptr + block, tl.sum(residual.to(tl.float64), axis=1), mask=block < blocks)
        # The sums have to be out before this program counts as arrived.
        tl.debug_barrier()
        if tl.atomic_add(columns_ptr + 4, 1) == programs - 1:
            token = _token(
                tl.load(uniforms_ptr + request), sums_ptr, target_ptr, draft_ptr, excluded_ptr, draft_row, excluded,
                vocab_size, blocks, HAS_DRAFT, EXCLUDED, FALLS_BACK, BLOCK, BLOCKS,
            )  # fmt: skip
            tl.store(out_ptr + place, token.to(out_ptr.dtype.element_ty))
