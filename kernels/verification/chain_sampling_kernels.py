"""Triton side of `outrider.kernels.chain_sampling`, whose rule and conventions hold here.

Two launches: `_accept_kernel`, one warp a request, tests all its drafts at once, writes all but the final token and
leaves in a `ResidualPlan` from which rows that is drawn; `outrider.kernels.sampling.residual_sampling` draws it with
the whole GPU.
"""

# compile-time parameters of kernels are upper case
# ruff: noqa: N803

from __future__ import annotations

import torch

from outrider.kernels.backend import jit, tl, triton
from outrider.kernels.noise import STREAM_COINS, STREAM_RESIDUAL, philox_words
from outrider.kernels.sampling.residual_sampling import (
    ResidualPlan,
    launch_residual_draw,
    overlap_options,
    with_dense_rows,
)
from outrider.kernels.sampling.residual_sampling_kernels import store_plan

__all__ = ["OFFSET_FACTOR", "launch_chain_sampling", "signed"]

_COINS = tl.constexpr(STREAM_COINS)
_RESIDUAL = tl.constexpr(STREAM_RESIDUAL)
# 0x9E3779B97F4A7C15, odd, as the signed number of the same bits.
OFFSET_FACTOR = 0x9E3779B97F4A7C15 - 2**64
_OFFSET_FACTOR = tl.constexpr(OFFSET_FACTOR)


def signed(value: int) -> int:
    """The int64 with the bits of `value` modulo 2^64."""
    return (value + 2**63) % 2**64 - 2**63


def launch_chain_sampling(
    draft_probs: torch.Tensor,
    draft_token_ids: torch.Tensor,
    target_probs: torch.Tensor,
    counters: tuple[torch.Tensor | None, torch.Tensor | None],
    seed: int | torch.Tensor,
    offset: int | torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`chain_speculative_sampling` of checked arguments."""
    requests, drafts = draft_token_ids.shape
    device = target_probs.device
    tokens = torch.empty(requests, drafts + 1, dtype=torch.int32, device=device)
    accepted, emitted = (
        torch.empty(requests, dtype=torch.int32, device=device) if given is None else given for given in counters
    )
    if requests == 0:
        return tokens, accepted, emitted
    ids = draft_token_ids.contiguous()
    target = with_dense_rows(target_probs)
    # Without drafts there is no row of q; any tensor will do, for none of it is read.
    draft = with_dense_rows(draft_probs) if drafts else target
    keys = [value.contiguous() if isinstance(value, torch.Tensor) else value for value in (seed, offset)]
    plan = ResidualPlan.empty(requests, device)
    _accept_kernel[(requests,)](
        tokens,
        accepted,
        emitted,
        ids,
        draft,
        target,
        plan.columns,
        plan.uniforms,
        *(signed(key) if isinstance(key, int) else 0 for key in keys),
        *(ids if isinstance(key, int) else key for key in keys),
        accepted.stride(0),
        emitted.stride(0),
        *draft.stride()[:2],
        *target.stride()[:2],
        drafts,
        target.shape[2],
        *(0 if isinstance(key, int) else len(key) for key in keys),
        ADDS_ACCEPTED=counters[0] is not None,
        ADDS_EMITTED=counters[1] is not None,
        LANES=triton.next_power_of_2(drafts + 1),
        num_warps=1,
        OVERLAPS=overlap_options(tokens)["OVERLAPS"],
    )
    launch_residual_draw(tokens, target, draft, plan, falls_back=True)
    return tokens, accepted, emitted


@jit
def _uniform(seed, offset, position, row, STREAM: tl.constexpr):
    """The uniforms of a block of positions, as in the module's docstring."""
    key = seed + (offset >> 32) * _OFFSET_FACTOR
    stream = tl.full([], STREAM, tl.int64)
    x0, x1, x2, x3 = philox_words(key, position >> 1, offset & 0xFFFFFFFF, stream, row)
    odd = (position & 1) == 1
    high, low = tl.where(odd, x2, x0), tl.where(odd, x3, x1)
    return ((high >> 5).to(tl.float64) * 67108864.0 + (low >> 6).to(tl.float64)) * 1.1102230246251565e-16


@jit
def _key_of_row(value, values_ptr, count, row):
    """A row's seed or offset: `value` if there is no tensor, else the tensor's only entry or the row's own."""
    value = value.to(tl.int64)
    if count > 0:
        value = tl.load(values_ptr + tl.where(count > 1, row, 0)).to(tl.int64)
    return value


@jit(do_not_specialize=["seed", "offset", "drafts", "seeds", "offsets"])
def _accept_kernel(
    tokens_ptr,  # [B, S + 1] int32
    accepted_ptr,  # [B] int
    emitted_ptr,  # [B] int
    ids_ptr,  # [B, S] int
    draft_ptr,  # [B, S, V] float
    target_ptr,  # [B, S + 1, V] float
    columns_ptr,  # [B, PLAN_COLUMNS] int64
    uniforms_ptr,  # [B] float64
    seed: tl.int64,
    offset: tl.int64,
    seeds_ptr,  # [seeds] int64
    offsets_ptr,  # [offsets] int64
    accepted_stride,
    emitted_stride,
    draft_stride,
    draft_row_stride,
    target_stride,
    target_row_stride,
    drafts,
    vocab_size,
    seeds,
    offsets,
    ADDS_ACCEPTED: tl.constexpr,
    ADDS_EMITTED: tl.constexpr,
    LANES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    position = tl.arange(0, LANES)
    token = tl.load(ids_ptr + row * drafts + position, mask=position < drafts, other=-1).to(tl.int64)
    usable = (token >= 0) & (token < vocab_size)
    place = row * draft_stride + position.to(tl.int64) * draft_row_stride + token
    q = tl.load(draft_ptr + place, mask=usable, other=0.0).to(tl.float64)
    place = row * target_stride + position.to(tl.int64) * target_row_stride + token
    p = tl.load(target_ptr + place, mask=usable, other=0.0).to(tl.float64)

    seed = _key_of_row(seed, seeds_ptr, seeds, row)
    offset = _key_of_row(offset, offsets_ptr, offsets, row)
    stream_row = tl.where(seeds > 1, 0, row)
    coins = _uniform(seed, offset, position, stream_row, _COINS)
    finals = _uniform(seed, offset, position, stream_row, _RESIDUAL)
    # Lanes at and past the chain's end hold no token, so `known` is at most S.
    known = tl.min(tl.where(usable, LANES, position))
    passes = usable & (position < known) & (coins * q < p)
    emitted = tl.min(tl.where(passes, LANES, position))
    accepted = tl.sum(passes.to(tl.int32))

    tl.store(tokens_ptr + row * (drafts + 1) + position, tl.where(position < emitted, token, -1).to(tl.int32),
             mask=(position <= drafts) & (position != emitted))  # fmt: skip
    accepted_ptr += row * accepted_stride
    emitted_ptr += row * emitted_stride
    emitted_count = emitted
    if ADDS_ACCEPTED:
        accepted += tl.load(accepted_ptr)
    if ADDS_EMITTED:
        emitted_count += tl.load(emitted_ptr)
    tl.store(accepted_ptr, accepted.to(accepted_ptr.dtype.element_ty))
    tl.store(emitted_ptr, emitted_count.to(emitted_ptr.dtype.element_ty))
    store_plan(
        columns_ptr,
        uniforms_ptr,
        row,
        emitted,
        tl.where(emitted < known, emitted, -1),
        row * (drafts + 1) + emitted,
        tl.full([], 0, tl.int64),
        tl.sum(tl.where(position == emitted, finals, 0.0)),
    )
