"""A sum over ranks, the residual and the norm after it in one launch: `exchange_parts` and `residual_norm` of few rows.

    letter[r]  = sum_p parts of rank r [p]                        rounded to the dtype of `hidden`
    hidden[t] += letter[0, t] + ... letter[W - 1, t]
    out[t]     = hidden[t] / sqrt(mean_n hidden[t, n]^2 + eps) * weight

A program has a row: it sends its rank's letter as words of two numbers and the count of the row's calls, waits for the
words of the others, and goes on with the row, so nothing comes between the last word and the norm.

Shapes: W ranks, P parts, T rows, N hidden sizes.
Sources: as of `outrider.kernels.collectives.all_reduce` and `outrider.kernels.linear.residual_norm`.
"""

# compile-time parameters of kernels are upper case
# ruff: noqa: N803

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.kernels.argument_checks import check_place, check_tensors
from outrider.kernels.backend import jit, tl, triton
from outrider.kernels.collectives.mailbox import Mailbox
from outrider.kernels.early_launch import early_options
from outrider.kernels.linear.residual_norm import normed_block, residual_norm_reference

__all__ = ["exchange_norm", "exchange_norm_reference"]


def exchange_norm(
    hidden: torch.Tensor,
    parts: torch.Tensor,
    weight: torch.Tensor,
    mailbox: Mailbox,
    *,
    eps: float,
    addend_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """Add what all ranks hold in parts to the hidden rows, in place, and norm them, once all ranks have called this.

    Args:
        hidden: [T, N] bfloat16 or float16, the same on all ranks, contiguous, updated in place.
        parts: [P, T, N] float32 or the dtype of `hidden`, each part contiguous.
        weight: [N], float32 or the dtype of `hidden`.
        mailbox: of this rank.
        eps: added to the mean of squares.
        addend_weight: [N], as `weight`: norm the sum with it before it is added.

    Returns:
        [T, N] in the dtype of `hidden`, the same bits on all ranks.

    Raises:
        ValueError: a shape, dtype, device or stride that does not fit, or more rows than the mailbox takes.
    """
    check_tensors(
        hidden=(hidden, ("T", "N"), (torch.bfloat16, torch.float16)),
        parts=(parts, ("P", "T", "N"), (torch.float32, hidden.dtype)),
    )
    check_place("hidden", hidden, mailbox.memory.device, "mailbox")
    rows, columns = hidden.shape
    if not hidden.is_contiguous() or (rows and not parts[0].is_contiguous()):
        raise ValueError("hidden, parts: contiguous rows needed")
    if not mailbox.takes_rows(rows, columns):
        raise ValueError(f"hidden: [{rows}, {columns}] given, the mailbox takes {mailbox.layout.row_counts} rows "
                         f"of {mailbox.layout.row_size}")  # fmt: skip
    normed = torch.empty_like(hidden)
    words, addresses = mailbox.next_rows()
    if rows:
        _launch(normed, hidden, parts, weight, addend_weight, eps, mailbox, words, addresses)
    return normed


def exchange_norm_reference(
    hidden: torch.Tensor,
    parts: Sequence[torch.Tensor],
    weight: torch.Tensor,
    *,
    eps: float,
    addend_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the result of `exchange_norm` where rank r gives parts[r], in plain torch."""
    letters = torch.stack([rank_parts.float().sum(0).to(hidden.dtype) for rank_parts in parts])
    return residual_norm_reference(hidden, letters, weight, eps=eps, addend_weight=addend_weight)


def _launch(
    normed: torch.Tensor,
    hidden: torch.Tensor,
    parts: torch.Tensor,
    weight: torch.Tensor,
    addend_weight: torch.Tensor | None,
    eps: float,
    mailbox: Mailbox,
    words: torch.Tensor,
    addresses: torch.Tensor,
) -> None:
    rows, columns = hidden.shape
    block = triton.next_power_of_2(columns)
    _exchange_norm_kernel[(rows,)](
        normed,
        hidden,
        parts,
        weight,
        weight if addend_weight is None else addend_weight,
        words,
        addresses,
        mailbox.row_calls,
        mailbox.stopped,
        parts.stride(0),
        columns,
        mailbox.layout.row_counts * (columns // 2),
        eps,
        PARTS=parts.shape[0],
        RANK=mailbox.rank,
        WORLD=mailbox.world_size,
        NORMS_ADDEND=addend_weight is not None,
        BLOCK_N=block,
        num_warps=min(max(block // 256, 1), 16),
        **early_options(hidden.device),
    )


@jit
def _exchange_norm_kernel(
    normed_ptr,  # [T, N]
    hidden_ptr,  # [T, N]
    parts_ptr,  # [PARTS, T, N]
    weight_ptr,  # [N]
    addend_weight_ptr,  # [N]
    words_ptr,  # [WORLD, rows, N / 2] int64, of this rank
    addresses_ptr,  # [WORLD] int64, of every rank's words
    calls_ptr,  # [rows] int64
    stopped_ptr,  # [1] int32
    part_stride,
    columns,
    rank_words,
    eps,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    NORMS_ADDEND: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EARLY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column, pair = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_N // 2)
    kept, pair_kept = column < columns, pair < columns // 2
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    weight = tl.load(weight_ptr + column, mask=kept, other=0).to(tl.float32)
    addend_weight = weight
    if NORMS_ADDEND:
        addend_weight = tl.load(addend_weight_ptr + column, mask=kept, other=0).to(tl.float32)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    call = tl.load(calls_ptr + row) + 1
    part_ptr = parts_ptr + row * columns
    sent = tl.load(part_ptr + column, mask=kept, other=0).to(tl.float32)
    for _ in tl.static_range(PARTS - 1):
        part_ptr += part_stride
        sent += tl.load(part_ptr + column, mask=kept, other=0).to(tl.float32)
    letter = sent.to(hidden_ptr.dtype.element_ty)
    low, high = tl.split(tl.reshape(letter.to(tl.int16, bitcast=True).to(tl.int64) & 0xFFFF, [BLOCK_N // 2, 2]))
    # The count of the call above two numbers' bits; eight bytes are written and read as one.
    word = (call << 32) | (high << 16) | low
    place = row * (columns // 2) + pair
    for rank in tl.static_range(WORLD):
        if rank != RANK:
            there = tl.multiple_of(tl.load(addresses_ptr + rank).to(words_ptr.dtype), 16)
            tl.store(there + RANK * rank_words.to(tl.int64) + place, word, mask=pair_kept)
    hidden_ptr += row * columns
    hidden = tl.load(hidden_ptr + column, mask=kept, other=0).to(tl.float32)
    total = tl.zeros([BLOCK_N], tl.float32)
    for rank in tl.static_range(WORLD):
        if rank == RANK:
            total += letter.to(tl.float32)
        else:
            here = words_ptr + rank * rank_words.to(tl.int64) + place
            word = tl.load(here, mask=pair_kept, other=0, volatile=True)
            late = tl.max((pair_kept & ((word ^ (call << 32)) >> 32 != 0)).to(tl.int32))
            stopped = tl.load(stopped_ptr, volatile=True)
            while (late != 0) & (stopped == 0):
                word = tl.load(here, mask=pair_kept, other=0, volatile=True)
                late = tl.max((pair_kept & ((word ^ (call << 32)) >> 32 != 0)).to(tl.int32))
                stopped = tl.load(stopped_ptr, volatile=True)
            both = tl.reshape(tl.join(word & 0xFFFF, (word >> 16) & 0xFFFF), [BLOCK_N])
            total += both.to(tl.int16).to(letter.dtype, bitcast=True).to(tl.float32)
    tl.store(calls_ptr + row, call)
    if NORMS_ADDEND:
        total = normed_block(total, addend_weight, columns, eps)
    hidden = (hidden + total).to(hidden_ptr.dtype.element_ty)
    tl.store(hidden_ptr + column, hidden, mask=kept)
    normed = normed_block(hidden.to(tl.float32), weight, columns, eps)
    tl.store(normed_ptr + row * columns + column, normed.to(normed_ptr.dtype.element_ty), mask=kept)
