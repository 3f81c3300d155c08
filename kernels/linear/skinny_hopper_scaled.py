"""Triton side of `outrider.kernels.linear.skinny` for Hopper and weights of 8 bits, in Gluon.

As `outrider.kernels.linear.skinny_hopper`, whose ring and copies it takes; half as many bytes of the weight come
through. A block of it goes from shared memory into registers, becomes bfloat16 (or float16) there, which holds every
float8_e4m3 number, and is the matrix units' operand from there. The sums of a row of the weight take its factor once:
before they are stored, or before gate and up meet.
"""

# compile-time values are upper case; a kernel is one function
# ruff: noqa: D103, N803, N806

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outrider.kernels.linear.skinny_hopper import _activated, _place, _produce, gl, gluon

if TYPE_CHECKING:
    fence_async_shared = gdc_launch_dependents = mbarrier = warpgroup_mma = warpgroup_mma_wait = gluon
else:
    from outrider.kernels.linear.skinny_hopper import HAS_GLUON

    if HAS_GLUON:
        from outrider.kernels.linear.skinny_hopper import (
            fence_async_shared,
            gdc_launch_dependents,
            mbarrier,
            warpgroup_mma,
            warpgroup_mma_wait,
        )

__all__ = ["scaled_block_layout", "skinny_linear_hopper_scaled_kernel"]


def scaled_block_layout() -> Any:
    """Return the shared-memory layout of a block of 8-bit numbers, 128 of K wide."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)


@gluon.jit
def _widened(block, SUMS: gl.constexpr, HALF: gl.constexpr):
    """A block of the weight as the left side of a product whose sums lie as SUMS: exactly, float16 or bfloat16."""
    BLOCK_N: gl.constexpr = block.shape[0]
    BLOCK_K: gl.constexpr = block.shape[1]
    # A thread reads sixteen bytes of a row at once, and the same ones of the row eight further down.
    READ: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 8], [8, 0], [0, 64]] + ([[64, 0]] if BLOCK_N == 128 else []),
        lane_bases=[[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[BLOCK_N, BLOCK_K],
    )
    if HALF:
        wide = gl.inline_asm_elementwise(
            """{
            .reg .b16 low, high;
            .reg .b32 ordered;
            prmt.b32 ordered, $2, 0, 0x3120;
            mov.b32 {low, high}, ordered;
            cvt.rn.f16x2.e4m3x2 $0, low;
            cvt.rn.f16x2.e4m3x2 $1, high;
            }""",
            "=r,=r,r", [block.load(READ)], dtype=gl.float16, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        # Exponent and mantissa move to where bfloat16 has them, which leaves the number 2^-120 of itself.
        wide = gl.inline_asm_elementwise(
            """{
            .reg .b32 bits, sign, factor;
            mov.b32 factor, 0x7b807b80;
            shl.b32 bits, $2, 4;
            shl.b32 sign, $2, 8;
            and.b32 bits, bits, 0x07f007f0;
            lop3.b32 bits, bits, sign, 0x80008000, 0xf8;
            mul.bf16x2 $0, bits, factor;
            shr.b32 bits, $2, 4;
            and.b32 bits, bits, 0x07f007f0;
            lop3.b32 bits, bits, $2, 0x80008000, 0xf8;
            mul.bf16x2 $1, bits, factor;
            }""",
            "=&r,=r,r", [block.load(READ)], dtype=gl.bfloat16, is_pure=True, pack=4,
        )  # fmt: skip
    # From where the numbers are stored to where they belong: places of bits only, each thread has what it multiplies.
    wide = wide.reshape([BLOCK_N, BLOCK_K // 64, 4, 4, 2, 2]).permute((0, 1, 3, 4, 2, 5)).reshape([BLOCK_N, BLOCK_K])
    return gl.convert_layout(wide, gl.DotOperandLayout(0, SUMS, 2), assert_trivial=True)


@gluon.jit
def _multiply(
    scales_ptr, out_ptr, rows, columns, inner, chunks, splits, units,
    weight_smem, up_smem, rows_smem, more_smem, ready, free,
    GATED: gl.constexpr, GELU: gl.constexpr, MORE: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = weight_smem.shape[0]
    BLOCK_N: gl.constexpr = weight_smem.shape[1]
    BLOCK_K: gl.constexpr = weight_smem.shape[2]
    BLOCK_T: gl.constexpr = rows_smem.shape[1]
    HALF: gl.constexpr = rows_smem.dtype.is_fp16()
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_T, 16])
    WIDTH: gl.constexpr = MORE if MORE else 8
    MORE_SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, WIDTH, 16])
    # The next kernel may take its places, and ask for its weights, at once; it waits for the results by itself.
    gdc_launch_dependents()
    stage = 0
    phase = 0
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        split, chunk, tile, begin, end = _place(unit, inner, chunks, splits, BLOCK_K)
        sums = gl.zeros([BLOCK_N, BLOCK_T], gl.float32, layout=SUMS)
        more_sums = gl.zeros([BLOCK_N, WIDTH], gl.float32, layout=MORE_SUMS)
        ups = sums
        more_ups = more_sums
        for _ in range(begin, end):
            mbarrier.wait(ready.index(stage), phase)
            narrow = rows_smem.index(stage).permute((1, 0))
            left = _widened(weight_smem.index(stage), SUMS, HALF)
            sums = warpgroup_mma(left, narrow, sums, is_async=True)
            if GATED:
                up_left = _widened(up_smem.index(stage), SUMS, HALF)
                ups = warpgroup_mma(up_left, narrow, ups, is_async=True)
            if MORE:
                more = more_smem.index(stage).permute((1, 0))
                left = gl.convert_layout(left, gl.DotOperandLayout(0, MORE_SUMS, 2), assert_trivial=True)
                more_sums = warpgroup_mma(left, more, more_sums, is_async=True)
                if GATED:
                    up_left = gl.convert_layout(up_left, gl.DotOperandLayout(0, MORE_SUMS, 2), assert_trivial=True)
                    more_ups = warpgroup_mma(up_left, more, more_ups, is_async=True)
                    sums, ups, more_sums, more_ups = warpgroup_mma_wait(0, deps=[sums, ups, more_sums, more_ups])
                else:
                    sums, more_sums = warpgroup_mma_wait(0, deps=[sums, more_sums])
            elif GATED:
                sums, ups = warpgroup_mma_wait(0, deps=[sums, ups])
            else:
                sums = warpgroup_mma_wait(0, deps=[sums])
            mbarrier.arrive(free.index(stage), count=1)
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        row = chunk * (BLOCK_T + MORE)
        _store(scales_ptr, out_ptr, sums, ups, row, tile * BLOCK_N, split, rows, columns, GATED, GELU)
        if MORE:
            _store(
                scales_ptr, out_ptr, more_sums, more_ups, row + BLOCK_T, tile * BLOCK_N, split, rows, columns,
                GATED, GELU,
            )  # fmt: skip


@gluon.jit
def _store(
    scales_ptr, out_ptr, sums, ups, row, column, split, rows, columns,
    GATED: gl.constexpr, GELU: gl.constexpr,
):  # fmt: skip
    """Write the tile of the result that begins at `row` and `column`."""
    BLOCK_N: gl.constexpr = sums.shape[0]
    BLOCK_T: gl.constexpr = sums.shape[1]
    SUMS: gl.constexpr = sums.type.layout
    column += gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, SUMS))
    row += gl.arange(0, BLOCK_T, layout=gl.SliceLayout(0, SUMS))
    sums *= gl.load(scales_ptr + column, mask=column < columns, other=0.0)[:, None]
    if GATED:
        ups *= gl.load(scales_ptr + columns + column, mask=column < columns, other=0.0)[:, None]
        sums = _activated(sums, GELU) * ups
    place = (split.to(gl.int64) * rows + row[None, :]) * columns + column[:, None]
    gl.store(
        out_ptr + place,
        sums.to(out_ptr.dtype.element_ty),
        mask=(column < columns)[:, None] & (row < rows)[None, :],
    )


# Not specialised: one compilation serves all numbers of rows.
@gluon.jit(do_not_specialize=["rows", "chunks", "splits", "units"])
def skinny_linear_hopper_scaled_kernel(
    rows_desc,  # [T, K] in blocks [BLOCK_T, BLOCK_K]
    more_desc,  # the same in blocks [MORE, BLOCK_K], where there are any
    weight_desc,  # [N, K] float8_e4m3 in blocks [BLOCK_N, BLOCK_K], or [2 N, K] where gated
    scales_ptr,  # [N] float32, or [2 N] where gated
    out_ptr,  # [splits, T, N]
    rows,
    columns,
    inner,
    chunks,
    splits,
    units,
    GATED: gl.constexpr,
    GELU: gl.constexpr,
    STAGES: gl.constexpr,
    MORE: gl.constexpr,
):
    BLOCK_N: gl.constexpr = weight_desc.block_shape[0]
    BLOCK_K: gl.constexpr = weight_desc.block_shape[1]
    BLOCK_T: gl.constexpr = rows_desc.block_shape[0]
    weight_smem = gl.allocate_shared_memory(weight_desc.dtype, [STAGES, BLOCK_N, BLOCK_K], weight_desc.layout)
    up_smem = weight_smem
    if GATED:
        up_smem = gl.allocate_shared_memory(weight_desc.dtype, [STAGES, BLOCK_N, BLOCK_K], weight_desc.layout)
    rows_smem = gl.allocate_shared_memory(rows_desc.dtype, [STAGES, BLOCK_T, BLOCK_K], rows_desc.layout)
    more_smem = rows_smem
    if MORE:
        more_smem = gl.allocate_shared_memory(rows_desc.dtype, [STAGES, MORE, BLOCK_K], rows_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1)
    fence_async_shared()
    gl.warp_specialize([
        (_multiply, (
            scales_ptr, out_ptr, rows, columns, inner, chunks, splits, units,
            weight_smem, up_smem, rows_smem, more_smem, ready, free, GATED, GELU, MORE,
        )),
        (_produce, (
            rows_desc, more_desc, weight_desc, columns, inner, chunks, splits, units,
            weight_smem, up_smem, rows_smem, more_smem, ready, free, GATED, MORE,
        )),
    ], [1], [40])  # fmt: skip
