"""Triton side of `outrider.kernels.linear.skinny` for Hopper, in Gluon: weights stream through a ring in shared memory.

One warp asks for blocks of the weight and of the rows (tensor memory accelerator), as far ahead as the ring holds; the
others multiply them on the matrix units (wgmma), the weight's rows as the tall side and the rows of the batch as the
narrow one, in one block of BLOCK_T and one of MORE: both are powers of two, and rows that are not there are slow to
fill with zeros. Barriers in shared memory say which blocks are filled and which are free, so that a
unit's last product and its stores run under the first copies of the next unit.

The first ring of weights is asked for before the wait for the kernel before this one (programmatic dependent launch):
weights do not hang on it. As a program takes less than half of a multiprocessor's shared memory, the next product's
first ring fills while this one still runs, and the memory never falls idle between two products.

A unit is BLOCK_N columns of the result (of both halves, where gated) for BLOCK_T + MORE rows over one of `splits`
ranges of K. Where K or N is no multiple of a block, the copies fill up with zeros.
"""

# compile-time values are upper case; a kernel is one function
# ruff: noqa: D103, N803, N806

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from outrider.kernels.backend import jit

if TYPE_CHECKING:
    # Kernels are a language of their own, as in `outrider.kernels.backend`.
    from outrider.kernels.backend import tl as gl

    gluon: Any = None
    fence_async_shared = gdc_launch_dependents = gdc_wait = mbarrier = tma = gluon
    TensorDescriptor = warpgroup_mma = warpgroup_mma_wait = gluon
    HAS_GLUON: bool
else:
    try:
        from triton.experimental import gluon
        from triton.experimental.gluon import language as gl
        from triton.experimental.gluon.language.nvidia.hopper import (
            fence_async_shared,
            mbarrier,
            tma,
            warpgroup_mma,
            warpgroup_mma_wait,
        )
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
        from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

        HAS_GLUON = True
    except ImportError:
        # No Triton, or one whose Gluon is older or newer than this: the kernel is defined, and never launched.
        gluon, gl = SimpleNamespace(jit=jit), SimpleNamespace(constexpr=int)
        TensorDescriptor = None
        HAS_GLUON = False

__all__ = ["HAS_GLUON", "TensorDescriptor", "block_layout", "skinny_linear_hopper_kernel"]


def block_layout() -> Any:
    """Return the shared-memory layout of a block of 16-bit numbers, 64 of K wide."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


@gluon.jit
def _place(unit, inner, chunks, splits, BLOCK_K: gl.constexpr):
    """Split, chunk of rows and tile of columns of a unit, and its range of blocks of K."""
    split = unit % splits
    chunk = unit // splits % chunks
    tile = unit // splits // chunks
    blocks = (inner + BLOCK_K - 1) // BLOCK_K
    return split, chunk, tile, split * blocks // splits, (split + 1) * blocks // splits


@gluon.jit
def _copy_rows(rows_desc, more_desc, chunk, place, ready, rows_smem, more_smem, MORE: gl.constexpr):
    """Ask for a block of a chunk's rows: of its BLOCK_T first, and of the MORE after them."""
    BLOCK_T: gl.constexpr = rows_smem.shape[0]
    row = chunk * (BLOCK_T + MORE)
    tma.async_copy_global_to_shared(rows_desc, [row, place], ready, rows_smem)
    if MORE:
        tma.async_copy_global_to_shared(more_desc, [row + BLOCK_T, place], ready, more_smem)


@gluon.jit
def _load(
    rows_desc, more_desc, weight_desc, chunk, tile, first, last, columns, stage, phase,
    weight_smem, up_smem, rows_smem, more_smem, ready, free,
    GATED: gl.constexpr, MORE: gl.constexpr,
):  # fmt: skip
    """Ask for blocks [first, last) of a unit, each as soon as its place in the ring is free; return the next place."""
    STAGES: gl.constexpr = weight_smem.shape[0]
    BLOCK_N: gl.constexpr = weight_smem.shape[1]
    BLOCK_K: gl.constexpr = weight_smem.shape[2]
    BLOCK_T: gl.constexpr = rows_smem.shape[1]
    WEIGHT: gl.constexpr = BLOCK_N * weight_smem.dtype.primitive_bitwidth // 8
    BYTES: gl.constexpr = BLOCK_K * (WEIGHT * (2 if GATED else 1) + 2 * (BLOCK_T + MORE))
    for block in range(first, last):
        mbarrier.wait(free.index(stage), phase ^ 1)
        mbarrier.expect(ready.index(stage), BYTES)
        place = block * BLOCK_K
        tma.async_copy_global_to_shared(
            weight_desc, [tile * BLOCK_N, place], ready.index(stage), weight_smem.index(stage)
        )
        if GATED:
            tma.async_copy_global_to_shared(
                weight_desc, [columns + tile * BLOCK_N, place], ready.index(stage), up_smem.index(stage)
            )
        _copy_rows(
            rows_desc, more_desc, chunk, place, ready.index(stage), rows_smem.index(stage), more_smem.index(stage), MORE
        )  # fmt: skip
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    return stage, phase


@gluon.jit
def _produce(
    rows_desc, more_desc, weight_desc, columns, inner, chunks, splits, units,
    weight_smem, up_smem, rows_smem, more_smem, ready, free,
    GATED: gl.constexpr, MORE: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = weight_smem.shape[0]
    BLOCK_N: gl.constexpr = weight_smem.shape[1]
    BLOCK_K: gl.constexpr = weight_smem.shape[2]
    BLOCK_T: gl.constexpr = rows_smem.shape[1]
    WEIGHT: gl.constexpr = BLOCK_N * weight_smem.dtype.primitive_bitwidth // 8
    BYTES: gl.constexpr = BLOCK_K * (WEIGHT * (2 if GATED else 1) + 2 * (BLOCK_T + MORE))
    first = gl.program_id(0)
    _split, chunk, tile, begin, end = _place(first, inner, chunks, splits, BLOCK_K)
    ahead = gl.minimum(end - begin, STAGES)
    for stage in range(0, ahead):
        mbarrier.expect(ready.index(stage), BYTES)
        place = (begin + stage) * BLOCK_K
        tma.async_copy_global_to_shared(
            weight_desc, [tile * BLOCK_N, place], ready.index(stage), weight_smem.index(stage)
        )
        if GATED:
            tma.async_copy_global_to_shared(
                weight_desc, [columns + tile * BLOCK_N, place], ready.index(stage), up_smem.index(stage)
            )
    gdc_wait()
    for stage in range(0, ahead):
        place = (begin + stage) * BLOCK_K
        _copy_rows(
            rows_desc, more_desc, chunk, place, ready.index(stage), rows_smem.index(stage), more_smem.index(stage), MORE
        )  # fmt: skip
    stage = ahead % STAGES
    phase = ahead // STAGES
    # The first unit stands by itself: with one loop over all units that starts its first round at `begin + ahead`,
    # Triton 3.6 to 3.7.1 start every round there.
    stage, phase = _load(
        rows_desc, more_desc, weight_desc, chunk, tile, begin + ahead, end, columns, stage, phase,
        weight_smem, up_smem, rows_smem, more_smem, ready, free, GATED, MORE,
    )  # fmt: skip
    for unit in range(first + gl.num_programs(0), units, gl.num_programs(0)):
        _split, chunk, tile, begin, end = _place(unit, inner, chunks, splits, BLOCK_K)
        stage, phase = _load(
            rows_desc, more_desc, weight_desc, chunk, tile, begin, end, columns, stage, phase,
            weight_smem, up_smem, rows_smem, more_smem, ready, free, GATED, MORE,
        )  # fmt: skip


@gluon.jit
def _activated(gate, GELU: gl.constexpr):
    """SiLU, or GELU by its tanh approximation, which is x * sigmoid(2 u)."""
    slope = gate
    if GELU:
        slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate / (1.0 + gl.exp(-slope))


@gluon.jit
def _multiply(
    out_ptr, rows, columns, inner, chunks, splits, units,
    weight_smem, up_smem, rows_smem, more_smem, ready, free,
    GATED: gl.constexpr, GELU: gl.constexpr, MORE: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = weight_smem.shape[0]
    BLOCK_N: gl.constexpr = weight_smem.shape[1]
    BLOCK_K: gl.constexpr = weight_smem.shape[2]
    BLOCK_T: gl.constexpr = rows_smem.shape[1]
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
            sums = warpgroup_mma(weight_smem.index(stage), narrow, sums, is_async=True)
            if GATED:
                ups = warpgroup_mma(up_smem.index(stage), narrow, ups, is_async=True)
            if MORE:
                more = more_smem.index(stage).permute((1, 0))
                more_sums = warpgroup_mma(weight_smem.index(stage), more, more_sums, is_async=True)
                if GATED:
                    more_ups = warpgroup_mma(up_smem.index(stage), more, more_ups, is_async=True)
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
        _store(out_ptr, sums, ups, row, tile * BLOCK_N, split, rows, columns, GATED, GELU)
        if MORE:
            _store(out_ptr, more_sums, more_ups, row + BLOCK_T, tile * BLOCK_N, split, rows, columns, GATED, GELU)


@gluon.jit
def _store(
    out_ptr, sums, ups, row, column, split, rows, columns,
    GATED: gl.constexpr, GELU: gl.constexpr,
):  # fmt: skip
    """Write the tile of the result that begins at `row` and `column`."""
    BLOCK_N: gl.constexpr = sums.shape[0]
    BLOCK_T: gl.constexpr = sums.shape[1]
    SUMS: gl.constexpr = sums.type.layout
    if GATED:
        sums = _activated(sums, GELU) * ups
    column += gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, SUMS))
    row += gl.arange(0, BLOCK_T, layout=gl.SliceLayout(0, SUMS))
    place = (split.to(gl.int64) * rows + row[None, :]) * columns + column[:, None]
    gl.store(
        out_ptr + place,
        sums.to(out_ptr.dtype.element_ty),
        mask=(column < columns)[:, None] & (row < rows)[None, :],
    )


# Not specialised: one compilation serves all numbers of rows.
@gluon.jit(do_not_specialize=["rows", "chunks", "splits", "units"])
def skinny_linear_hopper_kernel(
    rows_desc,  # [T, K] in blocks [BLOCK_T, BLOCK_K]
    more_desc,  # the same in blocks [MORE, BLOCK_K], where there are any
    weight_desc,  # [N, K] in blocks [BLOCK_N, BLOCK_K], or [2 N, K] where gated
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
    element: gl.constexpr = weight_desc.dtype
    weight_smem = gl.allocate_shared_memory(element, [STAGES, BLOCK_N, BLOCK_K], weight_desc.layout)
    up_smem = weight_smem
    if GATED:
        up_smem = gl.allocate_shared_memory(element, [STAGES, BLOCK_N, BLOCK_K], weight_desc.layout)
    rows_smem = gl.allocate_shared_memory(element, [STAGES, BLOCK_T, BLOCK_K], rows_desc.layout)
    more_smem = rows_smem
    if MORE:
        more_smem = gl.allocate_shared_memory(element, [STAGES, MORE, BLOCK_K], rows_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1)
    fence_async_shared()
    gl.warp_specialize([
        (_multiply, (
            out_ptr, rows, columns, inner, chunks, splits, units,
            weight_smem, up_smem, rows_smem, more_smem, ready, free, GATED, GELU, MORE,
        )),
        (_produce, (
            rows_desc, more_desc, weight_desc, columns, inner, chunks, splits, units,
            weight_smem, up_smem, rows_smem, more_smem, ready, free, GATED, MORE,
        )),
    ], [1], [40])  # fmt: skip
