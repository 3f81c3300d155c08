"""Paged tree attention over token-granular slots.

    out[r, h] = sum_j softmax_j(cap(scale * q[r, h] . k[slot_j, h // G])) v[slot_j, h // G]

over the keys j that row r may see (`TreeAttentionBatch`), with cap(x) = softcap * tanh(x / softcap) when softcap > 0
and the identity otherwise. With a sliding window w > 0 a key is also hidden when its token lies w or more positions
before the row's. Keys and values of the current rows must be in the caches before the call.

Shapes: T query rows, S sessions, H query heads, Hkv key/value heads, G = H / Hkv, D head size, L keys of one session.
"""

# compile-time parameters of kernels are upper case, pointers and strides positional; a kernel is one function
# ruff: noqa: N803, PLR0915, PLR0917

from __future__ import annotations

import functools

import torch

from outrider.kernels.backend import check_shape, jit, tl, triton, uses_triton
from outrider.kernels.tree_attention_batch import SessionPlan, TreeAttentionBatch

__all__ = ["TreeAttentionBatch", "tree_attention", "tree_attention_reference"]


def tree_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: TreeAttentionBatch,
    *,
    scale: float,
    sliding_window: int = 0,
    softcap: float = 0.0,
) -> torch.Tensor:
    """Attention of every query row to its session's prefix and, within the tree, to its ancestors and itself.

    Args:
        query: [T, H, D] float32, bfloat16 or float16.
        key_cache: [num_slots, Hkv, D], dtype of `query`.
        value_cache: [num_slots, Hkv, D], dtype of `query`.
        batch: who sees what; the same object for every layer of a step.
        scale: factor of the scores.
        sliding_window: tokens a row may look back on, itself included; 0 for no limit.
        softcap: bound of the scores; 0 for none.

    Returns:
        [T, H, D] in the dtype of `query`, accumulated in float32. A row that sees no key is zero. A row's result does
        not depend on the other sessions of the batch beyond float rounding.

    Raises:
        ValueError: a shape, dtype or device that does not fit, naming the argument, or a sliding window without
            `positions` and `slot_positions`.
    """
    _check_arguments(query, key_cache, value_cache, batch, sliding_window)
    run = _launch if uses_triton(query) else tree_attention_reference
    return run(query, key_cache, value_cache, batch, scale=scale, sliding_window=sliding_window, softcap=softcap)


def _check_arguments(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: TreeAttentionBatch,
    sliding_window: int,
) -> None:
    check_shape("query", query, (batch.prefix_len.shape[0], "H", "D"))
    check_shape("key_cache", key_cache, ("num_slots", "Hkv", query.shape[2]))
    check_shape("value_cache", value_cache, tuple(key_cache.shape))
    if key_cache.shape[1] == 0 or query.shape[1] % key_cache.shape[1]:
        raise ValueError(f"query: {query.shape[1]} heads given, a multiple of Hkv = {key_cache.shape[1]} needed")
    for name, tensor in (("key_cache", key_cache), ("value_cache", value_cache)):
        if tensor.dtype != query.dtype:
            raise ValueError(f"{name}: dtype {tensor.dtype} given, {query.dtype} (that of query) needed")
        if tensor.device != query.device:
            raise ValueError(f"{name}: device {tensor.device} given, {query.device} (that of query) needed")
    if batch.tree_mask.device != query.device:
        raise ValueError(f"batch: device {batch.tree_mask.device} given, {query.device} (that of query) needed")
    if sliding_window > 0:
        if batch.positions is None or batch.slot_positions is None:
            raise ValueError("batch: no positions or slot_positions given, both needed with a sliding window")
        check_shape("batch.slot_positions", batch.slot_positions, (key_cache.shape[0],))


def tree_attention_reference(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: TreeAttentionBatch,
    *,
    scale: float,
    sliding_window: int = 0,
    softcap: float = 0.0,
) -> torch.Tensor:
    """`tree_attention` in plain torch, session by session; this is what the service runs on a CPU.

    One gather, two products and one softmax a session measured faster than one padded batch over all sessions
    (16 sessions of one row and 300 keys: 0.44 ms against 2.2 ms), because the padded gather streams through memory
    what a single session keeps in cache.
    """
    rows, heads, head_dim = query.shape
    heads_kv = key_cache.shape[1]
    plan = batch.cpu_plan(key_cache.shape[0], sliding_window)
    out = torch.empty(query.shape) if plan.covers_all_rows else torch.zeros(query.shape)
    # [T, H, D] -> [Hkv, T * G, D]: the queries that share a key head are rows of one product; a view when Hkv is 1.
    grouped = (query.float() * scale).reshape(rows, heads_kv, -1, head_dim).transpose(0, 1)
    grouped = grouped.reshape(heads_kv, -1, head_dim)
    grouped_out = out if heads_kv == 1 else torch.zeros_like(grouped)
    grouped_out = grouped_out.view(heads_kv, -1, head_dim)
    group = heads // heads_kv
    for session in plan.sessions:
        mine = slice(session.row_begin * group, session.row_end * group)
        key, value = _gather(key_cache, session), _gather(value_cache, session)
        for head in range(heads_kv):
            weights = _weights(grouped[head, mine], key[:, head].float(), session, softcap)
            torch.mm(weights, value[:, head].float(), out=grouped_out[head, mine])
    if heads_kv > 1:
        out.view(rows, heads_kv, group, head_dim).copy_(
            grouped_out.view(heads_kv, rows, group, head_dim).transpose(0, 1)
        )
    return out.to(query.dtype)


def _gather(cache: torch.Tensor, session: SessionPlan) -> torch.Tensor:
    if session.slots is None:
        return cache[session.slot_begin : session.slot_begin + session.key_count]
    return cache.index_select(0, session.slots)


def _weights(query: torch.Tensor, key: torch.Tensor, session: SessionPlan, softcap: float) -> torch.Tensor:
    """Attention weights [rows * G, L] of a key head's scaled queries [rows * G, D]; zero where a row sees nothing."""
    scores = torch.mm(query, key.t())
    if softcap > 0:
        scores.div_(softcap).tanh_().mul_(softcap)
    if session.mask is not None:
        by_row = scores.view(session.row_end - session.row_begin, -1, session.key_count)
        by_row[..., session.mask_begin :] += session.mask
    weights = torch.softmax(scores, dim=-1)
    if session.blank is not None:
        by_row = weights.view(session.row_end - session.row_begin, -1, session.key_count)
        by_row.masked_fill_(session.blank, 0.0)
    return weights


def _launch(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: TreeAttentionBatch,
    *,
    scale: float,
    sliding_window: int,
    softcap: float,
) -> torch.Tensor:
    """One pass over the keys in splits, then their merge. Everything the grid depends on is known to the host."""
    rows, heads, head_dim = query.shape
    heads_kv = key_cache.shape[1]
    sessions = batch.key_len.shape[0]
    out = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
    if sessions == 0 or batch.max_query_len == 0 or batch.max_key_len == 0 or out.numel() == 0:
        return out
    group = heads // heads_kv
    block_m = min(max(triton.next_power_of_2(batch.max_query_len * group), 16), 64)
    # Key and value tiles of 32 rows where 64 would not leave room for two stages in shared memory.
    block_n = 32 if head_dim > 128 or query.element_size() > 2 else 64
    tiles = triton.cdiv(batch.max_query_len * group, block_m)
    split_keys = _keys_per_split(batch, tiles * heads_kv * sessions, block_n, query.device)
    splits = triton.cdiv(batch.max_key_len, split_keys)
    partial, log_mass = out, out
    if splits > 1:
        partial = torch.empty(rows, heads, splits, head_dim, dtype=torch.float32, device=query.device)
        log_mass = torch.empty(rows, heads, splits, dtype=torch.float32, device=query.device)
    _tree_attention_kernel[(tiles, heads_kv * splits, sessions)](
        query,
        key_cache,
        value_cache,
        partial,
        log_mass,
        batch.slot_table,
        batch.query_start.contiguous(),
        batch.tree_start.contiguous(),
        batch.prefix_len.contiguous(),
        batch.key_len.contiguous(),
        batch.tree_mask.contiguous(),
        batch.positions.contiguous() if sliding_window > 0 and batch.positions is not None else batch.prefix_len,
        batch.slot_positions.contiguous()
        if sliding_window > 0 and batch.slot_positions is not None
        else batch.prefix_len,
        *query.stride(),
        *key_cache.stride(),
        *value_cache.stride(),
        *batch.slot_table.stride(),
        rows,
        key_cache.shape[0],
        batch.max_key_len,
        batch.tree_mask.shape[1],
        split_keys,
        scale,
        softcap,
        sliding_window,
        SPLITS=splits,
        GROUP=group,
        HEAD_DIM=head_dim,
        HAS_SOFTCAP=softcap > 0,
        HAS_WINDOW=sliding_window > 0,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_D=triton.next_power_of_2(head_dim),
        num_warps=4,
        num_stages=2,
    )
    if splits > 1:
        _merge_kernel[(rows, heads)](
            partial,
            log_mass,
            out,
            batch.query_start.contiguous(),
            sessions,
            SPLITS=splits,
            HEADS=heads,
            HEAD_DIM=head_dim,
            BLOCK_S=triton.next_power_of_2(splits),
            BLOCK_D=triton.next_power_of_2(head_dim),
        )
    return out


# Below this many keys a split costs more in the merge than it gains in parallel work.
_MIN_SPLIT_KEYS = 256


def _keys_per_split(batch: TreeAttentionBatch, programs: int, block_n: int, device: torch.device) -> int:
    """Keys of one split: the caller's choice, or as few as give every multiprocessor two programs."""
    if batch.split_keys is not None:
        wanted = batch.split_keys
    else:
        splits = triton.cdiv(2 * _multiprocessors(device), programs)
        wanted = max(triton.cdiv(batch.max_key_len, splits), _MIN_SPLIT_KEYS)
    return triton.cdiv(wanted, block_n) * block_n


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    # Triton's interpreter works on CPU tensors; splits are then left to `split_keys` and to one processor.
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@jit
def _sees(tree_mask_ptr, row, row_ok, prefix_len, index, tree_start, words):
    """Which keys `index` the rows see by their prefix or their tree mask, [M, N] bool."""
    offset = index - tree_start
    in_tree = (offset >= 0) & (offset < words * 64)
    word = tl.load(
        tree_mask_ptr + row[:, None] * words + (offset >> 6)[None, :],
        mask=row_ok[:, None] & in_tree[None, :],
        other=0,
    )
    bit = (word >> (offset & 63)[None, :].to(tl.int64)) & 1
    return (index[None, :] < prefix_len[:, None]) | (bit != 0)


@jit
def _tree_attention_kernel(
    query_ptr,  # [T, H, D]
    key_ptr,  # [num_slots, Hkv, D]
    value_ptr,  # [num_slots, Hkv, D]
    out_ptr,  # [T, H, D], or with splits [T, H, SPLITS, D] float32
    log_mass_ptr,  # with splits [T, H, SPLITS] float32: log2 of the sum of exp of the scores
    slot_table_ptr,  # [S, max_len] int32
    query_start_ptr,  # [S + 1] int32
    tree_start_ptr,  # [S] int32
    prefix_len_ptr,  # [T] int32
    key_len_ptr,  # [S] int32
    tree_mask_ptr,  # [T, W] int64
    positions_ptr,  # [T] int32
    slot_positions_ptr,  # [num_slots] int32
    query_row_stride,
    query_head_stride,
    query_stride,
    key_slot_stride,
    key_head_stride,
    key_stride,
    value_slot_stride,
    value_head_stride,
    value_stride,
    table_row_stride,
    table_stride,
    rows,
    num_slots,
    max_key_len,
    words,
    split_keys,
    scale,
    softcap,
    window,
    SPLITS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    session = tl.program_id(2)
    head_kv = tl.program_id(1) // SPLITS
    split = tl.program_id(1) % SPLITS
    row_begin = tl.load(query_start_ptr + session)
    row_end = tl.minimum(tl.load(query_start_ptr + session + 1), rows)
    packed = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    if tl.program_id(0) * BLOCK_M >= (row_end - row_begin) * GROUP:
        return
    # Tile rows are (query row, head of the group): all that share one key head.
    row = (row_begin + packed // GROUP).to(tl.int64)
    head = head_kv * GROUP + packed % GROUP
    row_ok = (row < row_end) & (row >= 0)
    dim = tl.arange(0, BLOCK_D)
    dim_ok = dim < HEAD_DIM
    query = tl.load(
        query_ptr + row[:, None] * query_row_stride + head[:, None] * query_head_stride + dim[None, :] * query_stride,
        mask=row_ok[:, None] & dim_ok[None, :],
        other=0.0,
    )
    tree_start = tl.load(tree_start_ptr + session)
    prefix_len = tl.load(prefix_len_ptr + row, mask=row_ok, other=0)
    first = split * split_keys
    last = tl.minimum(tl.minimum(tl.load(key_len_ptr + session), max_key_len), first + split_keys)
    # Keys before this are in the prefix of every row: only their slots need a check.
    shared_prefix = tl.min(tl.where(row_ok, prefix_len, max_key_len))
    position = prefix_len
    if HAS_WINDOW:
        shared_prefix = tl.minimum(shared_prefix, 0)
        position = tl.load(positions_ptr + row, mask=row_ok, other=0)
    table_ptr = slot_table_ptr + session.to(tl.int64) * table_row_stride
    key_ptr += head_kv * key_head_stride
    value_ptr += head_kv * value_head_stride
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for begin in range(first, last, BLOCK_N):
        index = begin + tl.arange(0, BLOCK_N)
        slot = tl.load(table_ptr + index * table_stride, mask=index < last, other=-1).to(tl.int64)
        slot_ok = (slot >= 0) & (slot < num_slots)
        key = tl.load(
            key_ptr + slot[None, :] * key_slot_stride + dim[:, None] * key_stride,
            mask=slot_ok[None, :] & dim_ok[:, None],
            other=0.0,
        )
        scores = tl.dot(query, key, input_precision="ieee") * scale
        if HAS_SOFTCAP:
            scores = softcap * (1 - 2 / (tl.exp(2 * (scores / softcap)) + 1))
        # 0 or -inf to add, in float32: masks of one bit do not survive the compiler's changes of layout.
        hidden = tl.zeros([BLOCK_M, BLOCK_N], tl.float32) + tl.where(slot_ok, 0.0, float("-inf"))[None, :]
        if begin + BLOCK_N > shared_prefix:
            sees = _sees(tree_mask_ptr, row, row_ok, prefix_len, index, tree_start, words)
            hidden = tl.where(sees, hidden, float("-inf"))
            if HAS_WINDOW:
                key_position = tl.load(slot_positions_ptr + slot, mask=slot_ok, other=0)
                hidden = tl.where(position[:, None] - key_position[None, :] < window, hidden, float("-inf"))
        # Base 2 throughout: exp2 is what the hardware has.
        scores = scores * 1.4426950408889634 + hidden
        new_best = tl.maximum(best, tl.max(scores, axis=1))
        shift = tl.where(new_best == float("-inf"), 0.0, new_best)
        weights = tl.exp2(scores - shift[:, None])
        rescale = tl.exp2(best - shift)
        value = tl.load(
            value_ptr + slot[:, None] * value_slot_stride + dim[None, :] * value_stride,
            mask=slot_ok[:, None] & dim_ok[None, :],
            other=0.0,
        )
        mass = mass * rescale + tl.sum(weights, axis=1)
        mixed = mixed * rescale[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        best = new_best
    mixed = mixed / tl.where(mass > 0, mass, 1.0)[:, None]
    target = (row * (tl.num_programs(1) // SPLITS * GROUP) + head) * SPLITS + split
    tl.store(
        out_ptr + target[:, None] * HEAD_DIM + dim[None, :],
        mixed.to(out_ptr.dtype.element_ty),
        mask=row_ok[:, None] & dim_ok[None, :],
    )
    if SPLITS > 1:
        log_mass = tl.where(mass > 0, tl.log2(tl.where(mass > 0, mass, 1.0)) + best, float("-inf"))
        tl.store(log_mass_ptr + target, log_mass, mask=row_ok)


@jit
def _merge_kernel(
    partial_ptr,  # [T, H, SPLITS, D] float32
    log_mass_ptr,  # [T, H, SPLITS] float32
    out_ptr,  # [T, H, D]
    query_start_ptr,  # [S + 1] int32
    sessions,
    SPLITS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0)
    # Rows of no session were written by nobody; they keep their zeros.
    if (row < tl.load(query_start_ptr)) | (row >= tl.load(query_start_ptr + sessions)):
        return
    target = row.to(tl.int64) * HEADS + tl.program_id(1)
    split = tl.arange(0, BLOCK_S)
    dim = tl.arange(0, BLOCK_D)
    log_mass = tl.load(log_mass_ptr + target * SPLITS + split, mask=split < SPLITS, other=float("-inf"))
    best = tl.max(log_mass)
    weights = tl.exp2(log_mass - tl.where(best == float("-inf"), 0.0, best))
    partial = tl.load(
        partial_ptr + (target * SPLITS + split[:, None]) * HEAD_DIM + dim[None, :],
        mask=(split < SPLITS)[:, None] & (dim < HEAD_DIM)[None, :],
        other=0.0,
    )
    total = tl.sum(weights)
    mixed = tl.sum(weights[:, None] * partial, axis=0) / tl.where(total > 0, total, 1.0)
    tl.store(out_ptr + target * HEAD_DIM + dim, mixed.to(out_ptr.dtype.element_ty), mask=dim < HEAD_DIM)
