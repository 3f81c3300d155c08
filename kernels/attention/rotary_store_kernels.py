"""Triton side of `outrider.kernels.attention.rotary_store`, whose formulas hold here.

One program for a row and some of its heads, of whatever kind; every head is two halves of a tile.
"""

# compile-time values are upper case; a kernel is one function
# ruff: noqa: D103, N803, N806, PLR0915

from __future__ import annotations

from outrider.kernels.backend import jit, tl

__all__ = ["rotary_store_kernel"]


@jit
def rotary_store_kernel(
    query_ptr,  # [T, H, D]
    key_ptr,  # [num_slots, Hkv, D]
    value_ptr,  # [num_slots, Hkv, D]
    qkv_ptr,  # [PARTS, T, (H + 2 Hkv) * D]
    cos_sin_ptr,  # [positions, 2, D / 2] float32
    positions_ptr,  # [T] int
    write_slots_ptr,  # [T] int
    bias_ptr,  # [(H + 2 Hkv) * D]
    q_norm_ptr,  # [D]
    k_norm_ptr,  # [D]
    part_stride,
    row_stride,
    cos_sin_stride,
    sin_stride,
    key_slot_stride,
    key_head_stride,
    value_slot_stride,
    value_head_stride,
    all_positions,
    num_slots,
    chunks,
    eps,
    key_scale,
    value_scale,
    PARTS: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_KV: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_Q_NORM: tl.constexpr,
    HAS_K_NORM: tl.constexpr,
    SATURATES: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    EARLY: tl.constexpr,
):
    HALF: tl.constexpr = HEAD_DIM // 2
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    row = (tl.program_id(0) // chunks).to(tl.int64)
    head = tl.program_id(0) % chunks * BLOCK_H + tl.arange(0, BLOCK_H)
    lane = tl.arange(0, BLOCK_D)
    lane_ok = lane < HALF
    kept = (head < HEADS + 2 * HEADS_KV)[:, None] & lane_ok[None, :]
    is_query, is_value = head < HEADS, head >= HEADS + HEADS_KV
    position = tl.load(positions_ptr + row).to(tl.int64)
    position = tl.minimum(tl.maximum(position, 0), all_positions - 1)
    cos_sin_ptr += position * cos_sin_stride + lane
    cos = tl.load(cos_sin_ptr, mask=lane_ok, other=0)[None, :]
    sin = tl.load(cos_sin_ptr + sin_stride, mask=lane_ok, other=0)[None, :]
    slot = tl.load(write_slots_ptr + row).to(tl.int64)
    place = head[:, None] * HEAD_DIM + lane[None, :]
    if EARLY:
        tl.extra.cuda.gdc_wait()
    qkv_ptr += row * row_stride
    first = tl.load(qkv_ptr + place, mask=kept, other=0).to(tl.float32)
    second = tl.load(qkv_ptr + HALF + place, mask=kept, other=0).to(tl.float32)
    for _ in tl.static_range(PARTS - 1):
        qkv_ptr += part_stride
        first += tl.load(qkv_ptr + place, mask=kept, other=0).to(tl.float32)
        second += tl.load(qkv_ptr + HALF + place, mask=kept, other=0).to(tl.float32)
    if HAS_BIAS:
        first += tl.load(bias_ptr + place, mask=kept, other=0).to(tl.float32)
        second += tl.load(bias_ptr + HALF + place, mask=kept, other=0).to(tl.float32)
    if HAS_Q_NORM or HAS_K_NORM:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        share = (1.0 / tl.sqrt_rn(squares / HEAD_DIM + eps))[:, None]
        if HAS_Q_NORM:
            first, second = _head_normed(first, second, share, q_norm_ptr, is_query, lane, lane_ok, HALF)
        if HAS_K_NORM:
            is_key = (is_query == 0) & (is_value == 0)
            first, second = _head_normed(first, second, share, k_norm_ptr, is_key, lane, lane_ok, HALF)
    cos, sin = tl.where(is_value[:, None], 1.0, cos), tl.where(is_value[:, None], 0.0, sin)
    first, second = first * cos - second * sin, second * cos + first * sin

    query_ok = kept & is_query[:, None]
    target = query_ptr + row * (HEADS * HEAD_DIM) + place
    tl.store(target, first.to(query_ptr.dtype.element_ty), mask=query_ok)
    tl.store(target + HALF, second.to(query_ptr.dtype.element_ty), mask=query_ok)
    slot_ok = kept & ((slot >= 0) & (slot < num_slots))
    key_head, value_head = head - HEADS, head - HEADS - HEADS_KV
    key_ok = slot_ok & ((key_head >= 0) & (value_head < 0))[:, None]
    target = key_ptr + slot * key_slot_stride + (key_head.to(tl.int64) * key_head_stride)[:, None] + lane[None, :]
    _store_half(target, first, key_scale, key_ok, SATURATES)
    _store_half(target + HALF, second, key_scale, key_ok, SATURATES)
    value_ok = slot_ok & (value_head >= 0)[:, None]
    target = value_ptr + slot * value_slot_stride + (value_head.to(tl.int64) * value_head_stride)[:, None]
    target += lane[None, :]
    _store_half(target, first, value_scale, value_ok, SATURATES)
    _store_half(target + HALF, second, value_scale, value_ok, SATURATES)


@jit
def _head_normed(first, second, share, weight_ptr, mine, lane, lane_ok, HALF: tl.constexpr):
    """Both halves, normed where the head is `mine`."""
    weight_1 = tl.load(weight_ptr + lane, mask=lane_ok, other=0).to(tl.float32)[None, :]
    weight_2 = tl.load(weight_ptr + HALF + lane, mask=lane_ok, other=0).to(tl.float32)[None, :]
    mine = mine[:, None]
    return tl.where(mine, first * share * weight_1, first), tl.where(mine, second * share * weight_2, second)


@jit
def _store_half(target, values, scale, kept, SATURATES: tl.constexpr):
    values = values / scale
    if SATURATES:
        # 448 is the largest number of float8_e4m3fn.
        values = tl.minimum(tl.maximum(values, -448.0), 448.0)
    tl.store(target, values.to(target.dtype.element_ty), mask=kept)
