"""Attention of one new token a sequence to the keys and values of all before it, which lie in a cache of fixed length.

    out[n, h] = sum_t softmax_t(q[n, h] . k[n, h // G, t] / sqrt(D)) v[n, h // G, t]          t < length

Keys and values are read once for the G query heads that share them: reading them is all that a step of many sequences
costs, and batched products of three rows reach a quarter of the memory's rate.

Shapes: N sequences, K key/value heads, G query heads each, T tokens that the cache has room for, D head size.
"""

# compile-time parameters of kernels are upper case
# ruff: noqa: N803

import torch
from torch import Tensor

from outrider.kernels.backend import jit, tl, uses_triton

_BLOCK_KEYS = 64
# The fewest rows that matrix units take.
_BLOCK_ROWS = 16


def decode_attention(query: Tensor, keys: Tensor, values: Tensor, length: int) -> Tensor:
    """Return the attention [N, K, G, D] of queries [N, K, G, D] to the first `length` of keys and values [N, K, T, D].

    The head size is a power of two, and keys and values are contiguous.
    """
    if not uses_triton(query):
        return decode_attention_reference(query, keys, values, length)
    assert keys.is_contiguous()
    assert values.is_contiguous()
    query = query.contiguous()
    out = torch.empty_like(query)
    group, head_dim = query.shape[2:]
    _decode_attention_kernel[(query.shape[0] * query.shape[1],)](
        query, keys, values, out, length, keys.shape[2], 1.4426950408889634 * head_dim**-0.5,
        GROUP=group, HEAD_DIM=head_dim, BLOCK_G=max(_BLOCK_ROWS, 1 << (group - 1).bit_length()), BLOCK_T=_BLOCK_KEYS,
    )  # fmt: skip
    return out


def decode_attention_reference(query: Tensor, keys: Tensor, values: Tensor, length: int) -> Tensor:
    """See `decode_attention`."""
    scores = query @ keys[:, :, :length].mT * query.shape[-1] ** -0.5
    return scores.float().softmax(-1).to(query.dtype) @ values[:, :, :length]


@jit(do_not_specialize=["length"])
def _decode_attention_kernel(
    query_ptr,  # [N, K, G, D]
    key_ptr,  # [N, K, T, D]
    value_ptr,  # [N, K, T, D]
    out_ptr,  # [N, K, G, D]
    length,
    room,  # T
    scale,  # log2(e) / sqrt(D)
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """One program a sequence and key head: an online softmax over its keys."""
    head = tl.program_id(0).to(tl.int64)
    row, channel = tl.arange(0, BLOCK_G), tl.arange(0, HEAD_DIM)
    place = head * GROUP * HEAD_DIM + row[:, None] * HEAD_DIM + channel
    query = tl.load(query_ptr + place, mask=row[:, None] < GROUP, other=0.0)
    best = tl.full([BLOCK_G], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_G], tl.float32)
    mixed = tl.zeros([BLOCK_G, HEAD_DIM], tl.float32)
    for begin in range(0, length, BLOCK_T):
        token = begin + tl.arange(0, BLOCK_T)
        held = head * room * HEAD_DIM + token[:, None] * HEAD_DIM + channel
        key = tl.load(key_ptr + held, mask=token[:, None] < length, other=0.0)
        value = tl.load(value_ptr + held, mask=token[:, None] < length, other=0.0)
        scores = tl.where(token < length, tl.dot(query, tl.trans(key)) * scale, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_best[:, None])
        rescale = tl.exp2(best - new_best)
        mass = mass * rescale + tl.sum(weights, axis=1)
        mixed = mixed * rescale[:, None] + tl.dot(weights.to(value.dtype), value)
        best = new_best
    tl.store(out_ptr + place, (mixed / mass[:, None]).to(query.dtype), mask=row[:, None] < GROUP)
