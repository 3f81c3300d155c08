"""Triton side of `outrider.kernels.tree_attention` for Hopper, in Gluon: the pass over the keys, warp specialised.

Four warps gather keys and values, slot by slot, into a ring of blocks in shared memory by 16-byte asynchronous copies;
one or two groups of four warps hold a tile's queries and multiply on the matrix units (wgmma). Barriers in shared
memory say which blocks are filled and which are free, so that copies run under the products. A group asks for the
scores of a block before it asks for the mixture of the block before, and works out weights while that mixture is under
way.

Units, partial results and the merge are those of `outrider.kernels.attention.kernels`; a tile is GROUPS * ROWS
packed rows here.
"""

# compile-time values are upper case; a kernel is one function
# ruff: noqa: D103, N803, N806, PLR0915

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from outrider.kernels.attention.kernels import UNSPECIALISED

if TYPE_CHECKING:
    # Kernels are a language of their own, as in `outrider.kernels.backend`.
    from outrider.kernels.backend import tl as gl

    gluon: Any = None
    async_copy = fence_async_shared = gdc_launch_dependents = gdc_wait = mbarrier = gluon
    warpgroup_mma = warpgroup_mma_wait = gluon
    HAS_GLUON: bool
else:
    try:
        from triton.experimental import gluon
        from triton.experimental.gluon import language as gl
        from triton.experimental.gluon.language.nvidia.hopper import (
            async_copy,
            fence_async_shared,
            mbarrier,
            warpgroup_mma,
            warpgroup_mma_wait,
        )
        from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

        HAS_GLUON = True
    except ImportError:
        # No Triton, or one whose Gluon is older or newer than this: the kernel is defined, and never launched.
        gluon = SimpleNamespace(jit=lambda function=None, **_options: function or (lambda inner: inner))
        gl = SimpleNamespace(constexpr=int)
        HAS_GLUON = False

__all__ = ["HAS_GLUON", "attend_hopper_kernel"]


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _plan(query_start_ptr, key_len_ptr, sessions, rows, max_key_len, units_wanted, split_keys, least_keys,
          GROUP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_S: gl.constexpr):  # fmt: skip
    """Return rows, keys, tiles, splits and unit ends of every session, [BLOCK_S]; as `_plan` of `kernels.py`."""
    session = gl.arange(0, BLOCK_S, layout=gl.BlockedLayout([1], [32], [4], [0]))
    begin = gl.load(query_start_ptr + session, mask=session <= sessions, other=rows)
    end = gl.load(query_start_ptr + session + 1, mask=session < sessions, other=rows)
    keys = gl.load(key_len_ptr + session, mask=session < sessions, other=0)
    # Clamped before anything is computed from them: no content may lead out of the rows.
    begin = gl.minimum(gl.maximum(begin, 0), rows)
    end = gl.maximum(gl.minimum(end, rows), 0)
    tiles = gl.maximum((end - begin) * GROUP + (BLOCK_M - 1), 0) // BLOCK_M
    tiles = gl.where(session == sessions, gl.minimum(tiles, 1), tiles)
    keys = gl.maximum(gl.minimum(keys, max_key_len), 0)
    if split_keys > 0:
        splits = (keys + split_keys - 1) // split_keys
    else:
        work = gl.sum(tiles.to(gl.int64) * keys, 0).to(gl.float32)
        splits = (keys * (units_wanted / gl.maximum(work, 1.0)) + 1e-3).to(gl.int32)
        splits = gl.minimum(splits, (keys + least_keys - 1) // least_keys)
    splits = gl.maximum(splits, 1)
    return begin, end, keys, tiles, splits, gl.associative_scan(tiles * splits, 0, _add)


@gluon.jit
def _of(mine, values):
    return gl.sum(gl.where(mine, values, 0), 0)


@gluon.jit
def _reach(
    prefix_len_ptr, tree_mask_ptr, row_begin, row_end, packed_begin, tree_start, words, key_len,
    GROUP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_W: gl.constexpr,
):  # fmt: skip
    """Return how many keys all rows of a tile see by their prefixes, and the end of the keys that any sees."""
    TALL: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [gl.num_warps(), 1], [0, 1])
    row = row_begin + (packed_begin + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, TALL))) // GROUP
    row_ok = row < row_end
    prefix_len = gl.load(prefix_len_ptr + row, mask=row_ok, other=0)
    word = gl.arange(0, BLOCK_W, layout=gl.SliceLayout(0, TALL))
    bits = gl.load(
        tree_mask_ptr + row.to(gl.int64)[:, None] * words + word[None, :],
        mask=row_ok[:, None] & (word < words)[None, :],
        other=0,
    )
    seen = gl.where(bits != 0, (tree_start + 64 * (word + 1))[None, :], prefix_len[:, None])
    seen = gl.maximum(gl.max(seen, 1), prefix_len)
    # Never below 0: lengths out of range would wrap around in the differences with what comes back.
    return gl.maximum(gl.min(gl.where(row_ok, prefix_len, key_len), 0), 0), gl.maximum(gl.max(seen, 0), 0)


@gluon.jit
def _produce(
    query_ptr, key_ptr, value_ptr, table_ptr, prefix_len_ptr, tree_mask_ptr, row_begin, row_end, packed_begin, head_kv,
    first, last, tree_start, words, num_slots,
    query_row_stride, query_head_stride, key_slot_stride, value_slot_stride, table_stride,
    query_smem, key_smem, value_smem, query_ready, key_ready, value_ready, key_free, value_free,
    GROUP: gl.constexpr, WIDE: gl.constexpr, BLOCK_W: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    GROUPS: gl.constexpr = query_smem.shape[0]
    ROWS: gl.constexpr = query_smem.shape[1]
    DIM: gl.constexpr = query_smem.shape[2]
    STAGES: gl.constexpr = key_smem.shape[0]
    BLOCK_N: gl.constexpr = key_smem.shape[1]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [gl.num_warps(), 1], [1, 0])
    _least, seen = _reach(
        prefix_len_ptr, tree_mask_ptr, row_begin, row_end, packed_begin, tree_start, words, last,
        GROUP, GROUPS * ROWS, BLOCK_W,
    )  # fmt: skip
    last = gl.minimum(last, seen)
    dim = gl.arange(0, DIM, layout=gl.SliceLayout(0, LAYOUT))
    lane = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, LAYOUT))
    # Slots are asked for two blocks ahead: their latency must not stand between the blocks.
    slot = gl.load(table_ptr + (first + lane) * table_stride, mask=first + lane < last, other=-1)
    ahead = first + BLOCK_N + lane
    next_slot = gl.load(table_ptr + ahead * table_stride, mask=ahead < last, other=-1)
    # All so far is of the step and the same for every layer; queries, keys and values come from the launch before. The
    # groups that multiply wait for the queries, and so for it as well.
    if EARLY:
        gdc_wait()
    for member in gl.static_range(GROUPS):
        packed = packed_begin + member * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
        row = row_begin + packed // GROUP
        start = row.to(gl.int64) * query_row_stride + (head_kv * GROUP + packed % GROUP) * query_head_stride
        async_copy.async_copy_global_to_shared(
            query_smem.index(member), query_ptr + start[:, None] + dim[None, :], mask=(row < row_end)[:, None]
        )
    async_copy.mbarrier_arrive(query_ready, increment_count=False)
    stage = 0
    free = 1
    for begin in range(first, last, BLOCK_N):
        slot_ok = (slot >= 0) & (slot < num_slots)
        place = gl.where(slot_ok, slot, 0)
        slot = next_slot
        ahead = begin + 2 * BLOCK_N + lane
        next_slot = gl.load(table_ptr + ahead * table_stride, mask=ahead < last, other=-1)
        if WIDE:
            place = place.to(gl.int64)
        mbarrier.wait(key_free.index(stage), free)
        async_copy.async_copy_global_to_shared(
            key_smem.index(stage), key_ptr + (place[:, None] * key_slot_stride + dim[None, :]), mask=slot_ok[:, None]
        )
        async_copy.mbarrier_arrive(key_ready.index(stage), increment_count=False)
        mbarrier.wait(value_free.index(stage), free)
        async_copy.async_copy_global_to_shared(
            value_smem.index(stage),
            value_ptr + (place[:, None] * value_slot_stride + dim[None, :]),
            mask=slot_ok[:, None],
        )
        async_copy.mbarrier_arrive(value_ready.index(stage), increment_count=False)
        stage += 1
        if stage == STAGES:
            stage = 0
            free ^= 1
    async_copy.wait_group(0)


@gluon.jit
def _tree_bits(tree_mask_ptr, row, row_ok, offset, words):
    place = offset >> 6
    low = gl.load(tree_mask_ptr + row * words + place, mask=row_ok & (place >= 0) & (place < words), other=0)
    high = gl.load(tree_mask_ptr + row * words + place + 1, mask=row_ok & (place >= -1) & (place + 1 < words), other=0)
    shift = (offset & 63).to(gl.uint64)
    return (low.to(gl.uint64, bitcast=True) >> shift) | ((high.to(gl.uint64, bitcast=True) << 1) << (63 - shift))


@gluon.jit
def _masked(scores, bits, strays, table_ptr, table_stride, prefix_len, begin, last, num_slots):
    """The scores of a block of keys, -inf where the row does not see the key.

    `bits` are the rows' tree masks from the block's first key on; slots are looked at only where there are `strays`.
    """
    BLOCK_N: gl.constexpr = scores.shape[1]
    gl.static_assert(BLOCK_N == 64)
    lane = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, scores.type.layout))
    index = begin + lane
    slot = gl.load(table_ptr + index * table_stride, mask=(index < last) & (strays > 0), other=0)
    half = gl.where((lane & 32)[None, :] != 0, (bits >> 32).to(gl.uint32)[:, None], bits.to(gl.uint32)[:, None])
    bit = (half >> (lane & 31)[None, :].to(gl.uint32)) & 1
    there = (index < last) & (slot >= 0) & (slot < num_slots)
    sees = ((index[None, :] < prefix_len[:, None]) | (bit != 0)) & there[None, :]
    return gl.where(sees, scores, float("-inf"))


@gluon.jit
def _soften(scores, score_scale, best, mass):
    """One step of the online softmax: the new best and mass, the factor of what was before, the block's weights."""
    new_best = gl.maximum(best, gl.max(scores, 1) * score_scale)
    shift = gl.where(new_best == float("-inf"), 0.0, new_best)
    weights = gl.exp2(scores * score_scale - shift[:, None])
    rescale = gl.exp2(best - shift)
    return new_best, mass * rescale + gl.sum(weights, 1), rescale, weights


@gluon.jit
def _consume(
    out_ptr, partial_ptr, log_mass_ptr, table_ptr, prefix_len_ptr, tree_mask_ptr, row_begin, row_end, packed_begin,
    unit, splits, head_kv, first, last, tree_start, words, num_slots, table_stride, score_scale, value_scale,
    query_smem, key_smem, value_smem, query_ready, key_ready, value_ready, key_free, value_free,
    MEMBER: gl.constexpr, HEADS_KV: gl.constexpr, GROUP: gl.constexpr, HAS_PARTIAL: gl.constexpr,
    BLOCK_W: gl.constexpr,
):  # fmt: skip
    GROUPS: gl.constexpr = query_smem.shape[0]
    ROWS: gl.constexpr = query_smem.shape[1]
    DIM: gl.constexpr = query_smem.shape[2]
    STAGES: gl.constexpr = key_smem.shape[0]
    BLOCK_N: gl.constexpr = key_smem.shape[1]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    MIXED: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, MIXED, 2)
    SCAN: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    least, seen = _reach(
        prefix_len_ptr, tree_mask_ptr, row_begin, row_end, packed_begin, tree_start, words, last,
        GROUP, GROUPS * ROWS, BLOCK_W,
    )  # fmt: skip
    last = gl.minimum(last, seen)
    shared = first + gl.maximum(gl.minimum(least, last) - first, 0) // BLOCK_N * BLOCK_N
    # A slot out of range sends all blocks to the loop that looks at every slot.
    stray = gl.zeros([2048], gl.int32, layout=SCAN)
    for begin in range(first, last, 2048):
        index = begin + gl.arange(0, 2048, layout=SCAN)
        slot = gl.load(table_ptr + index * table_stride, mask=index < last, other=0)
        stray |= ((slot < 0) | (slot >= num_slots)).to(gl.int32)
    strays = gl.max(stray, 0)
    if strays > 0:
        shared = first
    packed = packed_begin + MEMBER * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
    row = (row_begin + packed // GROUP).to(gl.int64)
    row_ok = row < row_end
    prefix_len = gl.load(prefix_len_ptr + row, mask=row_ok, other=0)
    best = gl.full([ROWS], float("-inf"), gl.float32, layout=gl.SliceLayout(1, SCORES))
    mass = gl.zeros([ROWS], gl.float32, layout=gl.SliceLayout(1, SCORES))
    mixed = gl.zeros([ROWS, DIM], gl.float32, layout=MIXED)
    blank = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=SCORES)
    query = query_smem.index(MEMBER)
    mbarrier.wait(query_ready, 0)
    if first < last:
        # One block ahead: while the weights of a block are worked out, its values' product of before still runs.
        bits = _tree_bits(tree_mask_ptr, row, row_ok & (first >= shared), first - tree_start, words)
        mbarrier.wait(key_ready.index(0), 0)
        scores = warpgroup_mma(query, key_smem.index(0).permute((1, 0)), blank, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(key_free.index(0), count=1)
        if first >= shared:
            scores = _masked(scores, bits, strays, table_ptr, table_stride, prefix_len, first, last, num_slots)
        best, mass, rescale, weights = _soften(scores, score_scale, best, mass)
        left = gl.convert_layout(weights.to(query_smem.dtype), OPERAND)
        value_stage = 0
        value_phase = 0
        stage = 1 % STAGES
        phase = 1 // STAGES
        mbarrier.wait(key_ready.index(stage), phase, pred=first + BLOCK_N < last)
        for begin in range(first + BLOCK_N, shared, BLOCK_N):
            scores = warpgroup_mma(query, key_smem.index(stage).permute((1, 0)), blank, use_acc=False, is_async=True)
            mbarrier.wait(value_ready.index(value_stage), value_phase)
            mixed = warpgroup_mma(left, value_smem.index(value_stage), mixed, is_async=True)
            scores = warpgroup_mma_wait(1, deps=[scores])
            mbarrier.arrive(key_free.index(stage), count=1)
            best, mass, rescale, weights = _soften(scores, score_scale, best, mass)
            following = gl.convert_layout(weights.to(query_smem.dtype), OPERAND)
            free_stage = value_stage
            value_stage = stage
            value_phase = phase
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
            mbarrier.wait(key_ready.index(stage), phase, pred=begin + BLOCK_N < last)
            # Named here, or else the compiler works the weights out after the wait instead of under the product.
            mixed, left, following, rescale = warpgroup_mma_wait(0, deps=[mixed, left, following, rescale])
            mbarrier.arrive(value_free.index(free_stage), count=1)
            mixed = mixed * gl.convert_layout(rescale, gl.SliceLayout(1, MIXED))[:, None]
            left = following
        for begin in range(gl.maximum(first + BLOCK_N, shared), last, BLOCK_N):
            bits = _tree_bits(tree_mask_ptr, row, row_ok, begin - tree_start, words)
            scores = warpgroup_mma(query, key_smem.index(stage).permute((1, 0)), blank, use_acc=False, is_async=True)
            mbarrier.wait(value_ready.index(value_stage), value_phase)
            mixed = warpgroup_mma(left, value_smem.index(value_stage), mixed, is_async=True)
            scores = warpgroup_mma_wait(1, deps=[scores])
            mbarrier.arrive(key_free.index(stage), count=1)
            scores = _masked(scores, bits, strays, table_ptr, table_stride, prefix_len, begin, last, num_slots)
            best, mass, rescale, weights = _soften(scores, score_scale, best, mass)
            following = gl.convert_layout(weights.to(query_smem.dtype), OPERAND)
            free_stage = value_stage
            value_stage = stage
            value_phase = phase
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
            mbarrier.wait(key_ready.index(stage), phase, pred=begin + BLOCK_N < last)
            # Named here, or else the compiler works the weights out after the wait instead of under the product.
            mixed, left, following, rescale = warpgroup_mma_wait(0, deps=[mixed, left, following, rescale])
            mbarrier.arrive(value_free.index(free_stage), count=1)
            mixed = mixed * gl.convert_layout(rescale, gl.SliceLayout(1, MIXED))[:, None]
            left = following
        mbarrier.wait(value_ready.index(value_stage), value_phase)
        mixed = warpgroup_mma(left, value_smem.index(value_stage), mixed, is_async=True)
        mixed = warpgroup_mma_wait(0, deps=[mixed])
    share = value_scale / gl.where(mass > 0, mass, 1.0)
    mixed = mixed * gl.convert_layout(share, gl.SliceLayout(1, MIXED))[:, None]
    dim = gl.arange(0, DIM, layout=gl.SliceLayout(0, MIXED))
    place = MEMBER * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, MIXED))
    packed_out = packed_begin + place
    row_out = row_begin + packed_out // GROUP
    if HAS_PARTIAL and splits > 1:
        log_mass = gl.where(mass > 0, gl.log2(gl.where(mass > 0, mass, 1.0)) + best, float("-inf"))
        base = (unit.to(gl.int64) * HEADS_KV + head_kv) * (GROUPS * ROWS)
        gl.store(log_mass_ptr + base + (packed - packed_begin), log_mass, mask=row_ok)
        gl.store(partial_ptr + (base + place)[:, None] * DIM + dim[None, :], mixed, mask=(row_out < row_end)[:, None])
    else:
        target = (row_out.to(gl.int64) * HEADS_KV + head_kv) * GROUP + packed_out % GROUP
        gl.store(
            out_ptr + target[:, None] * DIM + dim[None, :],
            mixed.to(out_ptr.dtype.element_ty),
            mask=(row_out < row_end)[:, None],
        )


@gluon.jit(do_not_specialize=UNSPECIALISED)
def attend_hopper_kernel(
    query_ptr,  # [T, H, D]
    key_ptr,  # [num_slots, Hkv, D]
    value_ptr,  # [num_slots, Hkv, D]
    out_ptr,  # [T, H, D]
    partial_ptr,  # [units, Hkv, BLOCK_M, D] float32
    log_mass_ptr,  # [units, Hkv, BLOCK_M] float32
    slot_table_ptr,  # [S, max_len] int32
    query_start_ptr,  # [S + 1] int32
    tree_start_ptr,  # [S] int32
    prefix_len_ptr,  # [T] int32
    key_len_ptr,  # [S] int32
    tree_mask_ptr,  # [T, W] int64
    query_row_stride,
    query_head_stride,
    key_slot_stride,
    key_head_stride,
    value_slot_stride,
    value_head_stride,
    table_row_stride,
    table_stride,
    sessions,
    rows,
    num_slots,
    max_key_len,
    words,
    units_wanted,
    split_keys,
    least_keys,
    early_keys,
    score_scale,
    value_scale,
    HEADS_KV: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    HAS_PARTIAL: gl.constexpr,
    WIDE: gl.constexpr,
    GROUPS: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_S: gl.constexpr,
    BLOCK_W: gl.constexpr,
    STAGES: gl.constexpr,
    EARLY: gl.constexpr,
    GATHER_WARPS: gl.constexpr,
    GATHER_REGISTERS: gl.constexpr,
    GROUP_REGISTERS: gl.constexpr,
):
    BLOCK_M: gl.constexpr = GROUPS * ROWS
    head_kv = gl.program_id(0) % HEADS_KV
    unit = gl.program_id(0) // HEADS_KV
    begins, row_ends, keys, tiles, splits, ends = _plan(
        query_start_ptr,
        key_len_ptr,
        sessions,
        rows,
        max_key_len,
        units_wanted,
        split_keys,
        least_keys,
        GROUP,
        BLOCK_M,
        BLOCK_S,
    )
    sessions_of = gl.arange(0, BLOCK_S, layout=gl.BlockedLayout([1], [32], [4], [0]))
    tree_starts = gl.load(tree_start_ptr + sessions_of, mask=sessions_of < sessions, other=0)
    session = gl.sum((ends <= unit).to(gl.int32), 0)
    if session > sessions:
        # Someone must wait, even where nobody has work: the launches after this one count on it.
        if EARLY and gl.program_id(0) == 0:
            gdc_wait()
        return
    mine = sessions_of == session
    row_begin, row_end, key_len = _of(mine, begins), _of(mine, row_ends), _of(mine, keys)
    tree_start, tile_count, splits = _of(mine, tree_starts), _of(mine, tiles), _of(mine, splits)
    local = unit - _of(mine, ends) + tile_count * splits
    split = local // tile_count
    # The last tiles come first: in a prefill they have the most keys.
    tile = tile_count - 1 - local % tile_count
    FLAT: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    if session == sessions:
        # Rows of no session.
        if EARLY:
            gdc_wait()
        for begin in range(row_begin * GROUP, rows * GROUP, 64):
            packed = begin + gl.arange(0, 64, layout=gl.SliceLayout(1, FLAT))
            target = ((packed // GROUP).to(gl.int64) * HEADS_KV + head_kv) * GROUP + packed % GROUP
            gl.store(
                out_ptr + target[:, None] * HEAD_DIM + gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, FLAT))[None, :],
                gl.zeros([64, HEAD_DIM], out_ptr.dtype.element_ty, layout=FLAT),
                mask=(packed < rows * GROUP)[:, None],
            )
        return
    packed_begin = tile * BLOCK_M
    step = split_keys
    if split_keys <= 0:
        step = ((key_len + splits - 1) // splits + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    # Else at the program's end: over many keys the next launch may only take places away.
    if EARLY and step <= early_keys:
        gdc_launch_dependents()
    first = split * step
    last = gl.minimum(key_len, first + step)
    table_ptr = slot_table_ptr + session.to(gl.int64) * table_row_stride
    # In 64 bits, for a cache may have its heads outermost.
    key_ptr += head_kv.to(gl.int64) * key_head_stride
    value_ptr += head_kv.to(gl.int64) * value_head_stride

    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    element: gl.constexpr = query_ptr.dtype.element_ty
    query_smem = gl.allocate_shared_memory(element, [GROUPS, ROWS, HEAD_DIM], SWIZZLED)
    key_smem = gl.allocate_shared_memory(element, [STAGES, BLOCK_N, HEAD_DIM], SWIZZLED)
    value_smem = gl.allocate_shared_memory(element, [STAGES, BLOCK_N, HEAD_DIM], SWIZZLED)
    query_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    key_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    value_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    key_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    value_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(query_ready, count=32 * GATHER_WARPS)
    for stage in gl.static_range(STAGES):
        mbarrier.init(key_ready.index(stage), count=32 * GATHER_WARPS)
        mbarrier.init(value_ready.index(stage), count=32 * GATHER_WARPS)
        mbarrier.init(key_free.index(stage), count=GROUPS)
        mbarrier.init(value_free.index(stage), count=GROUPS)
    fence_async_shared()
    # The arguments stand here twice: compile-time values do not survive in a tuple with a name.
    # fmt: off
    if GROUPS == 2:
        gl.warp_specialize([
            (_consume, (
                out_ptr, partial_ptr, log_mass_ptr, table_ptr, prefix_len_ptr, tree_mask_ptr,
                row_begin, row_end, packed_begin, unit, splits, head_kv, first, last, tree_start, words, num_slots,
                table_stride, score_scale, value_scale,
                query_smem, key_smem, value_smem, query_ready, key_ready, value_ready, key_free, value_free,
                0, HEADS_KV, GROUP, HAS_PARTIAL, BLOCK_W,
            )),
            (_consume, (
                out_ptr, partial_ptr, log_mass_ptr, table_ptr, prefix_len_ptr, tree_mask_ptr,
                row_begin, row_end, packed_begin, unit, splits, head_kv, first, last, tree_start, words, num_slots,
                table_stride, score_scale, value_scale,
                query_smem, key_smem, value_smem, query_ready, key_ready, value_ready, key_free, value_free,
                1, HEADS_KV, GROUP, HAS_PARTIAL, BLOCK_W,
            )),
            (_produce, (
                query_ptr, key_ptr, value_ptr, table_ptr, prefix_len_ptr, tree_mask_ptr, row_begin, row_end,
                packed_begin, head_kv, first, last, tree_start, words, num_slots,
                query_row_stride, query_head_stride, key_slot_stride, value_slot_stride, table_stride,
                query_smem, key_smem, value_smem, query_ready, key_ready, value_ready, key_free, value_free,
                GROUP, WIDE, BLOCK_W, EARLY,
            )),
        ], [4, GATHER_WARPS], [GROUP_REGISTERS, GATHER_REGISTERS])
    else:
        gl.warp_specialize([
            (_consume, (
                out_ptr, partial_ptr, log_mass_ptr, table_ptr, prefix_len_ptr, tree_mask_ptr,
                row_begin, row_end, packed_begin, unit, splits, head_kv, first, last, tree_start, words, num_slots,
                table_stride, score_scale, value_scale,
                query_smem, key_smem, value_smem, query_ready, key_ready, value_ready, key_free, value_free,
                0, HEADS_KV, GROUP, HAS_PARTIAL, BLOCK_W,
            )),
            (_produce, (
                query_ptr, key_ptr, value_ptr, table_ptr, prefix_len_ptr, tree_mask_ptr, row_begin, row_end,
                packed_begin, head_kv, first, last, tree_start, words, num_slots,
                query_row_stride, query_head_stride, key_slot_stride, value_slot_stride, table_stride,
                query_smem, key_smem, value_smem, query_ready, key_ready, value_ready, key_free, value_free,
                GROUP, WIDE, BLOCK_W, EARLY,
            )),
        ], [GATHER_WARPS], [GATHER_REGISTERS])
