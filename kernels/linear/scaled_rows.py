"""Products of many rows with a weight of 8 bits, on the matrix units' 8-bit side.

    scales[t] = max |rows[t]| / 448        values[t] = rows[t] / scales[t], rounded to float8_e4m3
    result[t, n] = (sum over k of values[t, k] weight[n, k]) * scales[t] * weight_scales[n]

The sum is `torch._scaled_mm`'s. Rows lose three to four bits here, which `outrider.kernels.linear.skinny` spares them
where they are few: the matrix units are twice as fast, and only many rows keep them busy.

Shapes: T rows, K inner size, N columns of the result.
"""

# compile-time parameters of kernels are upper case
# ruff: noqa: N803

from __future__ import annotations

import functools

import torch

from outrider.kernels.argument_checks import FLOAT_DTYPES, check_tensors
from outrider.kernels.backend import jit, tl, triton, uses_triton
from outrider.kernels.linear.scaled_weight import LARGEST, ScaledWeight, is_interleaved, stored_order

__all__ = ["can_scale_rows", "scale_rows", "scale_rows_reference", "scaled_product"]

_TINY = torch.finfo(torch.float32).tiny


def can_scale_rows(rows: torch.Tensor, weight: ScaledWeight) -> bool:
    """Return True if `scaled_product` takes rows and weight: bfloat16, 8-bit matrix units, sizes multiples of 16."""
    return rows.dtype == torch.bfloat16 and not any(size % 16 for size in weight.shape) and _has_units(rows.device)


def scaled_product(rows: torch.Tensor, weight: ScaledWeight) -> torch.Tensor:
    """`rows weight^T` with both rounded to 8 bits.

    Args:
        rows: [T, K] bfloat16.
        weight: [N, K].

    Returns:
        [T, N] bfloat16.
    """
    values, scales = scale_rows(rows)
    return torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage] torch's only operator for it
        values,
        weight.values.T,
        scale_a=scales[:, None],
        scale_b=weight.scales[None, :],
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )


def scale_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Every row rounded to 8 bits by a factor of its own, in the order in which weights are stored.

    Args:
        rows: [T, K] bfloat16, float16 or float32.

    Returns:
        [T, K] float8_e4m3fn and [T] float32.

    Raises:
        ValueError: a shape or dtype that does not fit, naming the argument.
    """
    check_tensors(rows=(rows, ("T", "K"), FLOAT_DTYPES))
    if not uses_triton(rows):
        return scale_rows_reference(rows)
    count, inner = rows.shape
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    values = torch.empty(rows.shape, dtype=torch.float8_e4m3fn, device=rows.device)
    scales = torch.empty(count, dtype=torch.float32, device=rows.device)
    if count and inner:
        block = triton.next_power_of_2(inner)
        _scale_rows_kernel[(count,)](
            rows,
            values,
            scales,
            inner,
            rows.stride(0),
            INTERLEAVED=is_interleaved(inner),
            BLOCK_K=block,
            num_warps=min(max(block // 1024, 4), 16),
        )
    return values, scales


def scale_rows_reference(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`scale_rows` in plain torch."""
    wide = rows.float()[:, stored_order(rows.shape[1]).to(rows.device)]
    scales = (wide.abs().amax(dim=1) / LARGEST).clamp_(min=_TINY)
    return (wide / scales[:, None]).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scales


@jit
def _scale_rows_kernel(
    rows_ptr,  # [T, K]
    values_ptr,  # [T, K] float8_e4m3
    scales_ptr,  # [T] float32
    inner,
    row_stride,
    INTERLEAVED: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK_K)
    column = place
    if INTERLEAVED:
        # Place 16 c + 4 s + 2 l + h holds column 16 s + 8 h + 2 c + l.
        within = place % 64
        column = place - within + within // 4 % 4 * 16 + within % 2 * 8 + within // 16 * 2 + within // 2 % 2
    numbers = tl.load(rows_ptr + row * row_stride + column, mask=place < inner, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(numbers), 0) / 448.0, 1.1754943508222875e-38)
    numbers = tl.clamp(tl.div_rn(numbers, scale), -448.0, 448.0)
    tl.store(values_ptr + row * inner + place, numbers.to(tl.float8e4nv), mask=place < inner)
    tl.store(scales_ptr + row, scale)


@functools.cache
def _has_units(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) == (9, 0)
