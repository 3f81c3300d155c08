"""The end of one block of a decoder layer and the norm before the next, in one pass over the hidden rows.

    hidden[t] += sum_p addend[p, t]                      rounded to the dtype of `hidden`
    out[t]     = hidden[t] / sqrt(mean_n hidden[t, n]^2 + eps) * weight

With `addend_weight` (Gemma 2 and 3 norm what a block returns) the sum of the parts is normed with it first, by the same
formula. Everything between the tensors is float32; the hidden row and the result are each rounded once.

Shapes: T rows, N hidden sizes, P partial sums of a split reduction (1 where nothing was split).
Source: root mean square norm, arXiv 1910.07467.
"""

# compile-time parameters of kernels are upper case
# ruff: noqa: N803

from __future__ import annotations

import torch

from outrider.kernels.argument_checks import FLOAT_DTYPES, check_at_least, check_dense, check_tensors
from outrider.kernels.backend import jit, tl, triton, uses_triton
from outrider.kernels.early_launch import early_options

__all__ = ["normed_block", "residual_norm", "residual_norm_reference"]


def residual_norm(
    hidden: torch.Tensor,
    addend: torch.Tensor | None,
    weight: torch.Tensor,
    *,
    eps: float,
    addend_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """Add a block's result to the hidden rows, in place, and norm them.

    Args:
        hidden: [T, N] bfloat16, float16 or float32, updated in place.
        addend: [P, T, N], float32 or the dtype of `hidden`; None where there is nothing to add.
        weight: [N], float32 or the dtype of `hidden`, the factors as they are applied.
        eps: added to the mean of squares.
        addend_weight: [N], as `weight`: norm the sum of the parts with it before it is added.

    Returns:
        [T, N] in the dtype of `hidden`. A row's bits depend on nothing but the row and the count of parts.

    Raises:
        ValueError: a shape, dtype, device or stride that does not fit, naming the argument.
    """
    _check_arguments(hidden, addend, weight, addend_weight)
    if not uses_triton(hidden):
        return residual_norm_reference(hidden, addend, weight, eps=eps, addend_weight=addend_weight)
    normed = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    if hidden.numel():
        _launch(normed, hidden, addend, weight, addend_weight, eps)
    return normed


def _check_arguments(
    hidden: torch.Tensor, addend: torch.Tensor | None, weight: torch.Tensor, addend_weight: torch.Tensor | None
) -> None:
    allowed = (torch.float32, hidden.dtype)
    check_tensors(
        hidden=(hidden, ("T", "N"), FLOAT_DTYPES),
        addend=(addend, ("P", "T", "N"), allowed),
        weight=(weight, ("N",), allowed),
        addend_weight=(addend_weight, ("N",), allowed),
    )
    if addend is not None:
        check_at_least("addend parts", addend.shape[0], 1)
    elif addend_weight is not None:
        raise ValueError("addend_weight: given without an addend, which it norms")
    check_dense(hidden=hidden, addend=addend, weight=weight, addend_weight=addend_weight)


def residual_norm_reference(
    hidden: torch.Tensor,
    addend: torch.Tensor | None,
    weight: torch.Tensor,
    *,
    eps: float,
    addend_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """`residual_norm` in plain torch, on any device."""
    if addend is not None:
        total = _sum_of_parts(addend)
        if addend_weight is not None:
            total = _normed(total, addend_weight, eps)
        hidden.copy_(hidden.float() + total)
    return _normed(hidden.float(), weight, eps).to(hidden.dtype)


def _sum_of_parts(addend: torch.Tensor) -> torch.Tensor:
    """[T, N] float32, added in order."""
    total = addend[0].float()
    for part in addend[1:]:
        total = total + part.float()
    return total


def _normed(rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps) * weight.float()


def _launch(
    normed: torch.Tensor,
    hidden: torch.Tensor,
    addend: torch.Tensor | None,
    weight: torch.Tensor,
    addend_weight: torch.Tensor | None,
    eps: float,
) -> None:
    rows, columns = hidden.shape
    block = triton.next_power_of_2(columns)
    parts, part_stride, addend_stride = 0, 0, 0
    if addend is not None:
        parts, part_stride, addend_stride = addend.shape[0], addend.stride(0), addend.stride(1)
    _residual_norm_kernel[(rows,)](
        normed,
        hidden,
        hidden if addend is None else addend,
        weight,
        weight if addend_weight is None else addend_weight,
        hidden.stride(0),
        part_stride,
        addend_stride,
        columns,
        eps,
        PARTS=parts,
        NORMS_ADDEND=addend_weight is not None,
        BLOCK_N=block,
        # Not by the rows: another number changes the order of the sums, and so the bits. Many parts are many loads in
        # flight: 2.4 us instead of 4.0 for 16 of 4096 columns.
        num_warps=min(max(block // 128, 1), 32) if parts > 1 else min(max(block // 512, 1), 16),
        **early_options(hidden.device),
    )


@jit
def _residual_norm_kernel(
    normed_ptr,  # [T, N]
    hidden_ptr,  # [T, N]
    addend_ptr,  # [PARTS, T, N]
    weight_ptr,  # [N]
    addend_weight_ptr,  # [N]
    hidden_stride,
    part_stride,
    addend_stride,
    columns,
    eps,
    PARTS: tl.constexpr,
    NORMS_ADDEND: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EARLY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_N)
    kept = column < columns
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    weight = tl.load(weight_ptr + column, mask=kept, other=0).to(tl.float32)
    addend_weight = weight
    if NORMS_ADDEND:
        addend_weight = tl.load(addend_weight_ptr + column, mask=kept, other=0).to(tl.float32)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    hidden_ptr += row * hidden_stride
    hidden = tl.load(hidden_ptr + column, mask=kept, other=0)
    if PARTS > 0:
        addend_ptr += row * addend_stride
        total = tl.load(addend_ptr + column, mask=kept, other=0).to(tl.float32)
        for _ in tl.static_range(PARTS - 1):
            addend_ptr += part_stride
            total += tl.load(addend_ptr + column, mask=kept, other=0).to(tl.float32)
        if NORMS_ADDEND:
            total = normed_block(total, addend_weight, columns, eps)
        hidden = (hidden.to(tl.float32) + total).to(hidden_ptr.dtype.element_ty)
        tl.store(hidden_ptr + column, hidden, mask=kept)
    normed = normed_block(hidden.to(tl.float32), weight, columns, eps)
    tl.store(normed_ptr + row * columns + column, normed.to(normed_ptr.dtype.element_ty), mask=kept)


@jit
def normed_block(values, weight, columns, eps):
    """[BLOCK_N] float32; the values past the columns are zero."""
    return values * (1.0 / tl.sqrt_rn(tl.sum(values * values) / columns + eps)) * weight
