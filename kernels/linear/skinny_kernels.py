"""Triton side of `outrider.kernels.linear.skinny`: the product of any sizes, the weight the tall side."""

# compile-time parameters of kernels are upper case
# ruff: noqa: N803

from __future__ import annotations

from outrider.kernels.backend import jit, tl
from outrider.kernels.linear.gated_activation import activated

__all__ = ["skinny_linear_kernel"]


# Not specialised: one compilation serves all numbers of rows.
@jit(do_not_specialize=["rows", "splits"])
def skinny_linear_kernel(  # noqa: D103
    rows_ptr,  # [T, K]
    weight_ptr,  # [N, K], or [2 N, K] where gated
    scales_ptr,  # [N] or [2 N] float32 where SCALED
    out_ptr,  # [splits, T, N]
    rows,
    columns,
    inner,
    row_stride,
    weight_stride,
    up_start,
    splits,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    WIDE: tl.constexpr,
    SCALED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
):
    chunk, split, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if EARLY:
        # The next kernel may take its places now; all of this one waits for what was before.
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    blocks = tl.cdiv(inner, BLOCK_K)
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    row = chunk * BLOCK_T + tl.arange(0, BLOCK_T)
    tall = weight_ptr + column.to(tl.int64)[:, None] * weight_stride
    narrow = rows_ptr + row.to(tl.int64)[None, :] * row_stride
    sums = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    ups = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    for block in range(split * blocks // splits, (split + 1) * blocks // splits):
        place = block * BLOCK_K + tl.arange(0, BLOCK_K)
        tall_ok = (column < columns)[:, None] & (place < inner)[None, :]
        narrow_ok = (place < inner)[:, None] & (row < rows)[None, :]
        right = tl.load(narrow + place[:, None], mask=narrow_ok, other=0.0)
        stored = place
        if INTERLEAVED:
            # Column 16 s + 8 h + 2 c + l of 64 stands in place 16 c + 4 s + 2 l + h.
            within = place % 64
            stored = place - within + within // 2 % 4 * 16 + within // 16 * 4 + within % 2 * 2 + within // 8 % 2
        left = tl.load(tall + stored[None, :], mask=tall_ok, other=0.0)
        if WIDE:
            left, right = left.to(tl.float32), right.to(tl.float32)
        elif SCALED:
            left = left.to(right.dtype)
        sums = tl.dot(left, right, sums, input_precision="ieee")
        if GATED:
            left = tl.load(tall + up_start + stored[None, :], mask=tall_ok, other=0.0)
            if WIDE:
                left = left.to(tl.float32)
            elif SCALED:
                left = left.to(right.dtype)
            ups = tl.dot(left, right, ups, input_precision="ieee")
    if SCALED:
        sums *= tl.load(scales_ptr + column, mask=column < columns, other=0.0)[:, None]
        if GATED:
            ups *= tl.load(scales_ptr + columns + column, mask=column < columns, other=0.0)[:, None]
    if GATED:
        sums = activated(sums, GELU) * ups
    place = (split.to(tl.int64) * rows + row[None, :]) * columns + column[:, None]
    tl.store(
        out_ptr + place, sums.to(out_ptr.dtype.element_ty), mask=(column < columns)[:, None] & (row < rows)[None, :]
    )
