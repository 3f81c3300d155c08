"""The last token of a verdict: a draw from what the target has over the draft, in rows that only the device knows.

    r[t]  = max(p[t] - q[t], 0), and 0 for excluded tokens
    token = smallest t with r[t] > 0 and cumsum(r)[t] > u * sum(r); else the last t with r[t] > 0; else V - 1

Both rejection rules end so: `outrider.kernels.tree_sampling` and `outrider.kernels.chain_sampling`, whose walks write
into a `ResidualPlan` which rows of p and q each request draws from. One launch follows: a program for every request
and block of V sums its block, and of each request the program that arrives last looks up the token. Differences are
float32, their sums float64 and in an order fixed by V alone, so a row gives the same bits wherever it stands.

Shapes: bs requests, V vocabulary size, n tokens that can be excluded.
"""

# compile-time parameters of kernels are upper case; operators and kernels take positional columns
# ruff: noqa: N803, PLR0917

from __future__ import annotations

from dataclasses import dataclass

import torch

from outrider.kernels.backend import jit, tl, triton

__all__ = [
    "PLAN_COLUMNS",
    "ResidualPlan",
    "launch_residual_draw",
    "residual_tokens_reference",
    "store_plan",
    "with_dense_rows",
]

# p's row, q's row (-1: none), place of the token in the output (-1: no token), number of excluded tokens, programs
# that have arrived, and a place for what a walk read only to have it near.
PLAN_COLUMNS = 6
_PLAN_COLUMNS = tl.constexpr(PLAN_COLUMNS)
_LARGEST_BLOCK = 1024
# Few requests: many small programs, to have the whole GPU read. Many: larger ones, to have more in flight from each.
_GROUP, _MANY_BLOCKS = 4, 2048
_PROGRAMS = 1056


@dataclass(frozen=True, kw_only=True)
class ResidualPlan:
    """What a walk leaves on the device for the draw.

    Attributes:
        columns: [bs, PLAN_COLUMNS] int64, see `store_plan`.
        uniforms: [bs] float64, u of each request.
        excluded: [bs, n] int32, tokens without residual (-1: unused), or None.
    """

    columns: torch.Tensor
    uniforms: torch.Tensor
    excluded: torch.Tensor | None = None

    @classmethod
    def empty(cls, requests: int, device: torch.device, *, excluded: int = 0) -> ResidualPlan:
        """Room for a walk to write into; `excluded` is n."""
        return cls(
            columns=torch.empty(requests, PLAN_COLUMNS, dtype=torch.int64, device=device),
            uniforms=torch.empty(requests, dtype=torch.float64, device=device),
            excluded=torch.empty(requests, excluded, dtype=torch.int32, device=device) if excluded else None,
        )


def residual_tokens_reference(residual: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """One token of each row of `residual`.

    Args:
        residual: [R, V] float32, not negative.
        uniforms: [R] float, u of each row.

    Returns:
        [R] int64.
    """
    vocab_size = residual.shape[1]
    ids = torch.arange(vocab_size, device=residual.device)
    cumulative = residual.double().cumsum(1)
    threshold = uniforms.double()[:, None] * cumulative[:, -1:]
    first = torch.where((residual > 0) & (cumulative > threshold), ids, vocab_size).amin(1)
    last = torch.where(residual > 0, ids, -1).amax(1)
    return torch.where(first < vocab_size, first, torch.where(last >= 0, last, vocab_size - 1))


def with_dense_rows(probabilities: torch.Tensor) -> torch.Tensor:
    """`probabilities`, or a copy if the entries of a row are not neighbours in memory."""
    return probabilities if probabilities.stride(-1) == 1 else probabilities.contiguous()


def overlap_options(tensor: torch.Tensor) -> dict[str, bool]:
    """How the draw is launched: where the GPU can, before the walk has ended, to wait for it there."""
    overlaps = tensor.is_cuda and torch.cuda.get_device_capability(tensor.device) >= (9, 0)
    return {"OVERLAPS": True, "launch_pdl": True} if overlaps else {"OVERLAPS": False}


def launch_residual_draw(
    out: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor | None,
    plan: ResidualPlan,
    *,
    falls_back: bool,
) -> None:
    """Draw one token per request.

    Args:
        out: contiguous, int32 or int64; the token of request b goes to the place that `plan` names.
        target_probs: [bs, rows, V], dense rows.
        draft_probs: [bs, rows, V], dense rows, or None for zeros.
        plan: what the walk wrote.
        falls_back: whether a request without any residual draws from its row of p.
    """
    requests, _, vocab_size = target_probs.shape
    block = min(max(triton.next_power_of_2(vocab_size), 16), _LARGEST_BLOCK)
    blocks = triton.cdiv(vocab_size, block)
    group = _GROUP if requests * blocks > _MANY_BLOCKS else 1
    tiles = triton.cdiv(blocks, group)
    programs = min(tiles, max(_PROGRAMS // requests, 1))
    steps = triton.cdiv(tiles, programs)
    programs = triton.cdiv(tiles, steps)
    sums = torch.empty(requests, blocks, dtype=torch.float64, device=out.device)
    draft = target_probs if draft_probs is None else draft_probs
    excluded = plan.columns if plan.excluded is None else plan.excluded
    _residual_kernel[(requests * programs,)](
        out,
        target_probs,
        draft,
        plan.columns,
        plan.uniforms,
        excluded,
        sums,
        target_probs.stride(0),
        target_probs.stride(1),
        draft.stride(0),
        draft.stride(1),
        excluded.stride(0),
        vocab_size,
        blocks,
        programs,
        steps,
        HAS_DRAFT=draft_probs is not None,
        EXCLUDED=0 if plan.excluded is None else triton.next_power_of_2(plan.excluded.shape[1]),
        FALLS_BACK=falls_back,
        GROUP=group,
        BLOCK=block,
        BLOCKS=triton.next_power_of_2(blocks),
        num_warps=4,
        **overlap_options(out),
    )


@jit
def store_plan(columns_ptr, uniforms_ptr, request, target_row, draft_row, place, excluded, uniform):
    """For a walk: request `request` draws from these rows; also starts its count of arrivals."""
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
def _residual_kernel(
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
