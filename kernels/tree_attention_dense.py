"""Tree attention straight from its definition, in plain torch on any device: no plan, no tiles, nothing kept.

    row r of session s sees key j   when   j < prefix_len[r]  or  tree_mask[r] has bit j - tree_start[s]
                                    and    j < key_len[s]  and  slot_table[s, j] lies in the caches
                                    and    with a window w > 0:  position of r - position of j < w

This is what `attention_backend: reference` runs on a GPU, and what other backends are held against there; it builds
every score and waits for the host once a call. On a CPU the service runs `tree_attention_reference`, which plans once
a step and is several times as fast.

Shapes: T query rows, S sessions, H query heads, Hkv key/value heads, G = H / Hkv, D head size, L keys of one session.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch

from outrider.kernels.tree_attention_batch import TreeAttentionBatch

__all__ = ["sees", "tree_attention_dense"]


def tree_attention_dense(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: TreeAttentionBatch,
    *,
    scale: float,
    sliding_window: int = 0,
    softcap: float = 0.0,
) -> torch.Tensor:
    """`tree_attention` session by session; the same arguments and answer, [T, H, D]."""
    out = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
    num_slots, heads_kv, _ = key_cache.shape
    key_lens = batch.key_len.clamp(max=batch.slot_table.shape[1]).tolist()
    starts = batch.query_start.clamp(0, query.shape[0]).tolist()
    for session, (begin, end) in enumerate(pairwise(starts)):
        if begin >= end or key_lens[session] <= 0 or num_slots == 0:
            continue
        row = torch.arange(begin, end, device=query.device)
        index = torch.arange(key_lens[session], device=query.device)
        of_session = torch.full((), session, device=query.device)
        seen = sees(batch, row[:, None], of_session, index, num_slots=num_slots, sliding_window=sliding_window)
        slots = batch.slot_table[session, : key_lens[session]].long().clamp(0, num_slots - 1)
        # The queries that share a key head, [R, Hkv, G, D].
        grouped = (query[begin:end].float() * scale).unflatten(1, (heads_kv, -1))
        for head in range(heads_kv):
            weights = _weights(grouped[:, head], key_cache[slots, head].float(), seen, softcap)
            mixed = weights @ value_cache[slots, head].float()
            out[begin:end].unflatten(1, (heads_kv, -1))[:, head] = mixed.to(query.dtype)
    return out


def _weights(query: torch.Tensor, key: torch.Tensor, seen: torch.Tensor, softcap: float) -> torch.Tensor:
    """Attention weights [R, G, L] of scaled queries [R, G, D] over keys [L, D]; zero where a row sees nothing."""
    scores = query @ key.t()
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    weights = torch.softmax(scores.masked_fill(~seen[:, None], -math.inf), dim=-1)
    return weights.masked_fill(~seen.any(dim=-1)[:, None, None], 0.0)


def sees(
    batch: TreeAttentionBatch,
    row: torch.Tensor,
    session: torch.Tensor,
    index: torch.Tensor,
    *,
    num_slots: int,
    sliding_window: int,
) -> torch.Tensor:
    """Whether query row `row`, which is of session `session`, sees that session's key `index`.

    Args:
        batch: of one step.
        row: int64, below T; broadcasts with the next two.
        session: int64, below S.
        index: int64, below the width of the slot table.
        num_slots: of the caches.
        sliding_window: tokens a row may look back on, itself included; 0 for no limit.

    Returns:
        bool, in the shape that the three broadcast to.
    """
    slot = batch.slot_table[session, index]
    in_cache = (slot >= 0) & (slot < num_slots) & (index < batch.key_len[session])
    seen = in_cache & ((index < batch.prefix_len[row]) | _tree_bit(batch, row, index - batch.tree_start[session]))
    if sliding_window > 0:
        assert batch.positions is not None and batch.slot_positions is not None
        behind = batch.positions[row] - batch.slot_positions[slot.clamp(0, num_slots - 1).long()]
        seen = seen & (behind < sliding_window)
    return seen


def _tree_bit(batch: TreeAttentionBatch, row: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """Bit `offset` of a row's mask words; none below 0 or past the last word."""
    bits = 64 * batch.tree_mask.shape[1]
    if bits == 0:
        return torch.zeros_like(offset, dtype=torch.bool)
    word = batch.tree_mask[row, offset.clamp(0, bits - 1) >> 6]
    return (offset >= 0) & (offset < bits) & ((word >> (offset & 63)) & 1 != 0)
