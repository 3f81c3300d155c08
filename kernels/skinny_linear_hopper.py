"""Triton side of `outrider.kernels.skinny_linear` for Hopper, in Gluon: weights stream through a ring in shared memory.

One warp asks for blocks of the weight and of the rows (tensor memory accelerator), as far ahead as the ring holds; the
others multiply them on the matrix units (wgmma), the weight's rows as the tall side and the rows of the batch, padded
to BLOCK_T, as the narrow one. Barriers in shared memory say which blocks are filled and which are free, so that a
unit's last product and its stores run under the first copies of the next unit.

The first ring of weights is asked for before the wait for the kernel before this one (programmatic dependent launch):
weights do not hang on it. As a program takes less than half of a multiprocessor's shared memory, the next product's
first ring fills while this one still runs, and the memory never falls idle between two products.

A unit is BLOCK_N columns of the result (of both halves, where gated) for BLOCK_T rows over one of `splits` ranges of K.
Where K or N is no multiple of a block, the copies fill up with zeros.
"""

# compile-time values are upper case, pointers and strides positional; a kernel is one function
# ruff: noqa: D103, N803, N806, PLR0917

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
    """How a block of 16-bit numbers, 64 of K wide, lies in shared memory."""
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
def _prefetch(place, size, wanted):
    """Ask for `size` bytes at every wanted address, into the L2 cache only."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0; }",
        "=r,l,r,r",
        [place.to(gl.int64), size, wanted.to(gl.int32)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _prefetch_following(following_ptr, rows, inner, splits, size, BLOCK_K: gl.constexpr):
    """This program's share of the first `size` numbers of every range of K of every row of the following weight."""
    lane = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    blocks = (inner + BLOCK_K - 1) // BLOCK_K
    for begin in range(gl.program_id(0) * 32, rows * splits, gl.num_programs(0) * 32):
        piece = begin + lane
        place = following_ptr + (piece // splits).to(gl.int64) * inner + piece % splits * blocks // splits * BLOCK_K
        _prefetch(place, 2 * size + 0 * lane, piece < rows * splits)


@gluon.jit
def _load(
    rows_desc, weight_desc, chunk, tile, first, last, columns, stage, phase,
    weight_smem, up_smem, rows_smem, ready, free,
    GATED: gl.constexpr,
):  # fmt: skip
    """Ask for blocks [first, last) of a unit, each as soon as its place in the ring is free; the ring's next place."""
    STAGES: gl.constexpr = weight_smem.shape[0]
    BLOCK_N: gl.constexpr = weight_smem.shape[1]
    BLOCK_K: gl.constexpr = weight_smem.shape[2]
    BLOCK_T: gl.constexpr = rows_smem.shape[1]
    BYTES: gl.constexpr = 2 * BLOCK_K * (BLOCK_N * (2 if GATED else 1) + BLOCK_T)
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
        tma.async_copy_global_to_shared(rows_desc, [chunk * BLOCK_T, place], ready.index(stage), rows_smem.index(stage))
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    return stage, phase


@gluon.jit
def _produce(
    rows_desc, weight_desc, weight_ptr, following_ptr, columns, inner, weight_stride, chunks, splits, units, prefetch,
    following_rows, following_inner, following_splits, following_size,
    weight_smem, up_smem, rows_smem, ready, free,
    GATED: gl.constexpr, FOLLOWING: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = weight_smem.shape[0]
    BLOCK_N: gl.constexpr = weight_smem.shape[1]
    BLOCK_K: gl.constexpr = weight_smem.shape[2]
    BLOCK_T: gl.constexpr = rows_smem.shape[1]
    BYTES: gl.constexpr = 2 * BLOCK_K * (BLOCK_N * (2 if GATED else 1) + BLOCK_T)
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
    if prefetch > 0:
        row = tile * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.BlockedLayout([1], [32], [1], [0]))
        place = (begin + ahead) * BLOCK_K
        size = 2 * (gl.minimum(gl.minimum(end, begin + ahead + prefetch) * BLOCK_K, inner) - place) + 0 * row
        start = weight_ptr + row.to(gl.int64) * weight_stride + place
        _prefetch(start, size, (row < columns) & (size > 0))
        if GATED:
            _prefetch(start + columns.to(gl.int64) * weight_stride, size, (row < columns) & (size > 0))
    gdc_wait()
    for stage in range(0, ahead):
        place = (begin + stage) * BLOCK_K
        tma.async_copy_global_to_shared(rows_desc, [chunk * BLOCK_T, place], ready.index(stage), rows_smem.index(stage))
    stage = ahead % STAGES
    phase = ahead // STAGES
    # The first unit stands by itself: with one loop over all units that starts its first round at `begin + ahead`,
    # Triton 3.6 to 3.7.1 start every round there.
    stage, phase = _load(
        rows_desc, weight_desc, chunk, tile, begin + ahead, end, columns, stage, phase,
        weight_smem, up_smem, rows_smem, ready, free, GATED,
    )  # fmt: skip
    for unit in range(first + gl.num_programs(0), units, gl.num_programs(0)):
        _split, chunk, tile, begin, end = _place(unit, inner, chunks, splits, BLOCK_K)
        stage, phase = _load(
            rows_desc, weight_desc, chunk, tile, begin, end, columns, stage, phase,
            weight_smem, up_smem, rows_smem, ready, free, GATED,
        )  # fmt: skip
    if FOLLOWING:
        _prefetch_following(following_ptr, following_rows, following_inner, following_splits, following_size, BLOCK_K)


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
    weight_smem, up_smem, rows_smem, ready, free,
    GATED: gl.constexpr, GELU: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = weight_smem.shape[0]
    BLOCK_N: gl.constexpr = weight_smem.shape[1]
    BLOCK_K: gl.constexpr = weight_smem.shape[2]
    BLOCK_T: gl.constexpr = rows_smem.shape[1]
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_T, 16])
    # The next kernel may take its places, and ask for its weights, at once; it waits for the results by itself.
    gdc_launch_dependents()
    stage = 0
    phase = 0
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        split, chunk, tile, begin, end = _place(unit, inner, chunks, splits, BLOCK_K)
        sums = gl.zeros([BLOCK_N, BLOCK_T], gl.float32, layout=SUMS)
        ups = sums
        for _ in range(begin, end):
            mbarrier.wait(ready.index(stage), phase)
            narrow = rows_smem.index(stage).permute((1, 0))
            sums = warpgroup_mma(weight_smem.index(stage), narrow, sums, is_async=True)
            if GATED:
                ups = warpgroup_mma(up_smem.index(stage), narrow, ups, is_async=True)
                sums, ups = warpgroup_mma_wait(0, deps=[sums, ups])
            else:
                sums = warpgroup_mma_wait(0, deps=[sums])
            mbarrier.arrive(free.index(stage), count=1)
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        if GATED:
            sums = _activated(sums, GELU) * ups
        column = tile * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, SUMS))
        row = chunk * BLOCK_T + gl.arange(0, BLOCK_T, layout=gl.SliceLayout(0, SUMS))
        place = (split.to(gl.int64) * rows + row[None, :]) * columns + column[:, None]
        gl.store(
            out_ptr + place,
            sums.to(out_ptr.dtype.element_ty),
            mask=(column < columns)[:, None] & (row < rows)[None, :],
        )


# Not specialised: one compilation serves all numbers of rows.
@gluon.jit(
    do_not_specialize=[
        "rows",
        "chunks",
        "splits",
        "units",
        "prefetch",
        "following_rows",
        "following_splits",
        "following_size",
    ]
)
def skinny_linear_hopper_kernel(
    rows_desc,  # [T, K] in blocks [BLOCK_T, BLOCK_K]
    weight_desc,  # [N, K] in blocks [BLOCK_N, BLOCK_K], or [2 N, K] where gated
    weight_ptr,  # the same
    following_ptr,  # [following_rows, following_inner], the weight of a later product, where FOLLOWING
    out_ptr,  # [splits, T, N]
    rows,
    columns,
    inner,
    weight_stride,
    chunks,
    splits,
    units,
    prefetch,
    following_rows,
    following_inner,
    following_splits,
    following_size,
    GATED: gl.constexpr,
    GELU: gl.constexpr,
    STAGES: gl.constexpr,
    FOLLOWING: gl.constexpr,
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
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1)
    fence_async_shared()
    gl.warp_specialize([
        (_multiply, (
            out_ptr, rows, columns, inner, chunks, splits, units,
            weight_smem, up_smem, rows_smem, ready, free, GATED, GELU,
        )),
        (_produce, (
            rows_desc, weight_desc, weight_ptr, following_ptr, columns, inner, weight_stride, chunks, splits, units,
            prefetch, following_rows, following_inner, following_splits, following_size,
            weight_smem, up_smem, rows_smem, ready, free, GATED, FOLLOWING,
        )),
    ], [1], [40])  # fmt: skip
