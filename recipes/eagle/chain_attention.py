"""Attention of drafting chains: causal to the rows of the text up to a chain's root, and to the chain's own rows.

    mixed[m]  = sum over t <= r[m] of w[m, t] value[t]  +  sum over s of v[m, s] own_value[m, s]
    (w, v)[m] = softmax of scale * query[m] . (key[t], own_key[m, s])

The text's part is a fused kernel's, and no weights are ever in memory. Kernels return the logarithm L of the sum of
exponentials beside what they mix, so that both parts can be merged. Backwards they make weights anew as
exp(score - L), and take of the result no more than the mean of the incoming gradient under all weights, which they get
from the output: given L and output of both parts they return the exact gradients of theirs (FlashAttention-2, arXiv
2307.08691).

Chains that are not followed leave their rows of the kernel's queries at zero, which gives gradients of zero.

Shapes: N sequences of T rows, M chains, S own rows of each; H query heads, K key and value heads, D channels.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def attend(query: Tensor, key: Tensor, value: Tensor, *, roots: Tensor, own_key: Tensor, own_value: Tensor) -> Tensor:
    """Return what the chains' rows mix, [M, H, D].

    Args:
        query: [M, H, D].
        key, value: [N, H, T, D] of the text.
        roots: [M] int64, each chain's root among the N * T rows, none twice.
        own_key, own_value: [S, M, K, D].
    """
    # The stubs do not know what a Function returns.
    return _ChainAttention.apply(query, key, value, roots, own_key, own_value)  # pyright: ignore[reportReturnType]


def attend_reference(
    query: Tensor, key: Tensor, value: Tensor, *, roots: Tensor, own_key: Tensor, own_value: Tensor
) -> Tensor:
    """See `attend`; with all weights in memory."""
    length, scale = key.shape[2], query.shape[2] ** -0.5
    group = query.shape[1] // own_key.shape[2]
    sequence, row = roots // length, roots % length
    own_key, own_value = (each.repeat_interleave(group, 2) for each in (own_key, own_value))
    scores = torch.einsum("mhd,mhtd->mht", query, key[sequence]) * scale
    unseen = torch.arange(length, device=row.device) > row[:, None]
    scores = scores.masked_fill(unseen[:, None], float("-inf"))
    own = torch.einsum("mhd,smhd->mhs", query, own_key) * scale
    weights = torch.cat((scores, own), dim=-1).softmax(-1)
    mixed = torch.einsum("mht,mhtd->mhd", weights[..., :length], value[sequence])
    return mixed + torch.einsum("mhs,smhd->mhd", weights[..., length:], own_value)


class _ChainAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, roots: Tensor, own_key: Tensor, own_value: Tensor
    ) -> Tensor:
        mixed, log_sum, ctx.backward_kernel = _fused(_spread(query, roots, key), key, value)
        mixed, log_sum = (_gather(each, roots) for each in (mixed, log_sum))
        mixed, log_sum = merge(query, mixed, log_sum, own_key, own_value)
        ctx.save_for_backward(query, key, value, roots, own_key, own_value, mixed, log_sum)
        return mixed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        query, key, value, roots, own_key, own_value, mixed, log_sum = ctx.saved_tensors
        (gradient,) = gradients
        of_query, of_own_key, of_own_value = merge_backward(
            gradient, query, own_key, own_value, mixed=mixed, log_sum=log_sum
        )
        wide, wide_query, wide_mixed = (_spread(each, roots, key) for each in (gradient, query, mixed))
        of_wide, of_key, of_value = ctx.backward_kernel(
            wide, wide_query, key, value, wide_mixed, _spread(log_sum, roots, key)
        )
        return of_query + _gather(of_wide, roots), of_key, of_value, None, of_own_key, of_own_value


def merge(query: Tensor, mixed: Tensor, log_sum: Tensor, own_key: Tensor, own_value: Tensor) -> tuple[Tensor, Tensor]:
    """Return what both parts mix, [M, H, D], and their log-sum [M, H], given those of the text's part."""
    if not len(own_key):
        return mixed, log_sum
    scores = _own_scores(query, own_key)
    total = torch.logaddexp(log_sum, scores.logsumexp(0))
    weights = (scores - total).exp()
    own = (weights[..., None] * _by_head(own_value, query)).sum(0)
    return ((log_sum - total).exp()[..., None] * mixed.float() + own).to(query.dtype), total


def merge_backward(
    gradient: Tensor, query: Tensor, own_key: Tensor, own_value: Tensor, *, mixed: Tensor, log_sum: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query (the part by own rows), own keys and own values.

    `mixed` and `log_sum` are those of both parts.
    """
    gradient, scale = gradient.float(), query.shape[2] ** -0.5
    weights = (_own_scores(query, own_key) - log_sum).exp()
    along = (gradient * _by_head(own_value, query)).sum(-1) - (gradient * mixed.float()).sum(-1)
    of_scores = (scale * weights * along)[..., None]
    of_query = (of_scores * _by_head(own_key, query)).sum(0)
    group = (own_key.shape[2], -1)
    of_key = (of_scores * query.float()).unflatten(2, group).sum(3)
    of_value = (weights[..., None] * gradient).unflatten(2, group).sum(3)
    return of_query.to(query.dtype), of_key.to(query.dtype), of_value.to(query.dtype)


def _own_scores(query: Tensor, own_key: Tensor) -> Tensor:
    """[S, M, H] float32."""
    return query.shape[2] ** -0.5 * (query.float() * _by_head(own_key, query)).sum(-1)


def _by_head(own: Tensor, query: Tensor) -> Tensor:
    """[S, M, K, D] to [S, M, H, D] float32."""
    return own.float().repeat_interleave(query.shape[1] // own.shape[2], 2)


def _spread(rows: Tensor, roots: Tensor, key: Tensor) -> Tensor:
    """[M, H, ...] to [N, H, T, ...] at the roots, zero elsewhere."""
    sequences, heads, length, _ = key.shape
    wide = rows.new_zeros((sequences * length, *rows.shape[1:])).index_copy_(0, roots, rows)
    # Kernels read log-sums as they lie in memory, and rows of any stride.
    wide = wide.view(sequences, length, heads, *rows.shape[2:]).transpose(1, 2)
    return wide if rows.ndim == 3 else wide.contiguous()


def _gather(wide: Tensor, roots: Tensor) -> Tensor:
    """[N, H, T, ...] to [M, H, ...]."""
    return wide.transpose(1, 2).flatten(0, 1)[roots]


def _fused(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Callable[..., tuple[Tensor, ...]]]:
    """Causal attention, [N, H, T, D] each: what is mixed, log-sums [N, H, T], and the kernel's way back."""
    if query.is_cuda:
        mixed, log_sum, *held, _ = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True)

        def backward(*saved: Tensor) -> tuple[Tensor, ...]:
            places, seeds = held[:4], held[4:]
            return aten._scaled_dot_product_flash_attention_backward(*saved, *places, 0.0, True, *seeds)

        return mixed, log_sum, backward
    mixed, log_sum = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, True)
    return mixed, log_sum, lambda *saved: aten._scaled_dot_product_flash_attention_for_cpu_backward(*saved, 0.0, True)
