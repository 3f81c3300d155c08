"""From the product of queries, keys and values to what attention reads: bias, head norms, rotary embedding, caches.

    x            = sum_p qkv[p, t] + bias                    heads of D: H of queries, Hkv of keys, Hkv of values
    x[h]         = x[h] / sqrt(mean_d x[h, d]^2 + eps) * norm        queries with q_norm, keys with k_norm, where given
    (a, b)       = the halves of x[h], for queries and keys
    rotated[h]   = (a cos - b sin, b cos + a sin)             cos and sin of the row's position
    query[t]     = rotated queries
    key_cache[s] = rotated keys / key_scale, value_cache[s] = values / value_scale,      s = write_slots[t]

Everything is float32 until it is stored. A slot outside the caches is not stored, and a position outside the table
takes its nearest end. Caches of 8-bit floats are stored saturated.

Shapes: T rows, P partial sums of a split reduction (1 where nothing was split), H query heads, Hkv key/value heads, D
head size.
Source: rotary embedding, arXiv 2104.09864, by halves as the Llama family does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from outrider.kernels.argument_checks import FLOAT_DTYPES, INDEX_DTYPES, check_at_least, check_dense, check_tensors
from outrider.kernels.attention.rotary_store_kernels import rotary_store_kernel
from outrider.kernels.backend import check_shape, triton, uses_triton
from outrider.kernels.early_launch import early_options

__all__ = ["rotary_store", "rotary_store_reference"]


def rotary_store(
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    write_slots: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    *,
    heads: int,
    eps: float = 0.0,
    bias: torch.Tensor | None = None,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    query_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Store the rows' keys and values, and return their queries.

    `cos_sin`, `positions` and `write_slots` are read before the launch before has ended: see
    `outrider.kernels.early_launch`.

    Args:
        qkv: [P, T, (H + 2 Hkv) * D] bfloat16, float16 or float32: the heads of queries, keys and values.
        cos_sin: [positions, 2, D / 2] float32.
        positions: [T] int32 or int64.
        write_slots: [T] int32 or int64; a row whose slot is out of range stores nothing.
        key_cache: [num_slots, Hkv, D] bfloat16, float16, float32 or float8_e4m3fn, written.
        value_cache: as `key_cache`, written.
        heads: H.
        eps: of the head norms.
        bias: [(H + 2 Hkv) * D], or None.
        q_norm: [D] factors of the queries' norm, or None for no norm.
        k_norm: [D] factors of the keys' norm, or None for no norm.
        key_scale: stored keys are divided by it.
        value_scale: stored values are divided by it.
        query_dtype: of the result; None for that of the caches, or of `qkv` where they hold 8-bit floats.

    Returns:
        [T, H, D], contiguous.

    Raises:
        ValueError: a shape, dtype, device or stride that does not fit, naming the argument.
    """
    step = _Step(
        qkv, cos_sin, positions, write_slots, key_cache, value_cache, heads=heads, eps=eps, bias=bias, q_norm=q_norm,
        k_norm=k_norm, key_scale=key_scale, value_scale=value_scale, query_dtype=query_dtype,
    )  # fmt: skip
    step.check()
    return _launch(step) if uses_triton(qkv) else _in_torch(step)


@dataclass(frozen=True, slots=True)
class _Step:
    """The arguments of one call."""

    qkv: torch.Tensor
    cos_sin: torch.Tensor
    positions: torch.Tensor
    write_slots: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    heads: int
    eps: float = 0.0
    bias: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    key_scale: float = 1.0
    value_scale: float = 1.0
    query_dtype: torch.dtype | None = None

    @property
    def result_dtype(self) -> torch.dtype:
        if self.query_dtype is not None:
            return self.query_dtype
        return self.qkv.dtype if self.key_cache.dtype == torch.float8_e4m3fn else self.key_cache.dtype

    def check(self) -> None:
        check_shape("key_cache", self.key_cache, ("num_slots", "Hkv", "D"))
        _, heads_kv, head_dim = self.key_cache.shape
        check_at_least("heads", self.heads, 1)
        if head_dim % 2:
            raise ValueError(f"key_cache: head size {head_dim} given, an even one needed")
        columns = (self.heads + 2 * heads_kv) * head_dim
        check_tensors(
            qkv=(self.qkv, ("P", "T", columns), FLOAT_DTYPES),
            cos_sin=(self.cos_sin, ("positions", 2, head_dim // 2), (torch.float32,)),
            positions=(self.positions, ("T",), INDEX_DTYPES),
            write_slots=(self.write_slots, ("T",), INDEX_DTYPES),
            key_cache=(self.key_cache, ("num_slots", "Hkv", "D"), (*FLOAT_DTYPES, torch.float8_e4m3fn)),
            value_cache=(self.value_cache, ("num_slots", "Hkv", "D"), (self.key_cache.dtype,)),
            bias=(self.bias, (columns,), FLOAT_DTYPES),
            q_norm=(self.q_norm, (head_dim,), FLOAT_DTYPES),
            k_norm=(self.k_norm, (head_dim,), FLOAT_DTYPES),
        )
        check_at_least("qkv parts", self.qkv.shape[0], 1)
        check_at_least("cos_sin positions", self.cos_sin.shape[0], 1)
        if self.result_dtype not in FLOAT_DTYPES:
            needed = ", ".join(map(str, FLOAT_DTYPES))
            raise ValueError(f"query_dtype: {self.query_dtype} given, one of {needed} needed")
        check_dense(
            qkv=self.qkv, cos_sin=self.cos_sin, positions=self.positions, write_slots=self.write_slots,
            key_cache=self.key_cache, value_cache=self.value_cache, bias=self.bias, q_norm=self.q_norm,
            k_norm=self.k_norm,
        )  # fmt: skip


def rotary_store_reference(
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    write_slots: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    **options: Any,
) -> torch.Tensor:
    """`rotary_store` in plain torch, on any device; the arguments are not checked."""
    return _in_torch(_Step(qkv, cos_sin, positions, write_slots, key_cache, value_cache, **options))


def _in_torch(step: _Step) -> torch.Tensor:
    total = step.qkv[0].float()
    for part in step.qkv[1:]:
        total = total + part.float()
    if step.bias is not None:
        total = total + step.bias.float()
    num_slots, heads_kv, head_dim = step.key_cache.shape
    query, key, value = total.view(-1, step.heads + 2 * heads_kv, head_dim).split(
        [step.heads, heads_kv, heads_kv], dim=1
    )
    cos, sin = step.cos_sin[step.positions.long().clamp(0, step.cos_sin.shape[0] - 1)][:, :, None].unbind(1)
    query = _rotated(_head_norm(query, step.q_norm, step.eps), cos, sin)
    key = _rotated(_head_norm(key, step.k_norm, step.eps), cos, sin)
    slots = step.write_slots.long()
    stored = (slots >= 0) & (slots < num_slots)
    if not stored.all():
        slots, key, value = slots[stored], key[stored], value[stored]
    for cache, rows, scale in ((step.key_cache, key, step.key_scale), (step.value_cache, value, step.value_scale)):
        _store(cache, slots, rows if scale == 1 else rows / scale)
    return query.to(step.result_dtype)


def _head_norm(heads: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    if weight is None:
        return heads
    return heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + eps) * weight.float()


def _rotated(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """[T, heads, D] rotated by cos and sin [T, 1, D / 2]."""
    first, second = heads.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _store(cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    if cache.dtype == torch.float8_e4m3fn:
        # Torch turns what is too large into NaN. Bytes, for not every device writes 8-bit floats by index.
        largest = torch.finfo(cache.dtype).max
        cache.view(torch.uint8)[slots] = rows.clamp(-largest, largest).to(cache.dtype).view(torch.uint8)
    else:
        cache[slots] = rows.to(cache.dtype)


def _launch(step: _Step) -> torch.Tensor:
    qkv, (num_slots, heads_kv, head_dim) = step.qkv, step.key_cache.shape
    rows, all_heads = qkv.shape[1], step.heads + 2 * heads_kv
    query = torch.empty(rows, step.heads, head_dim, dtype=step.result_dtype, device=qkv.device)
    if rows == 0:
        return query
    # Four heads a warp, whatever the rows: another layout would change the order of a norm's sum, and so its bits.
    warps = 1 if rows <= _FEW_ROWS else 4
    chunks = triton.cdiv(all_heads, 4 * warps)
    rotary_store_kernel[(rows * chunks,)](
        query,
        step.key_cache,
        step.value_cache,
        qkv,
        step.cos_sin,
        step.positions,
        step.write_slots,
        *(qkv if tensor is None else tensor for tensor in (step.bias, step.q_norm, step.k_norm)),
        *qkv.stride()[:2],
        *step.cos_sin.stride()[:2],
        *step.key_cache.stride()[:2],
        *step.value_cache.stride()[:2],
        step.cos_sin.shape[0],
        num_slots,
        chunks,
        step.eps,
        step.key_scale,
        step.value_scale,
        PARTS=qkv.shape[0],
        HEADS=step.heads,
        HEADS_KV=heads_kv,
        HEAD_DIM=head_dim,
        HAS_BIAS=step.bias is not None,
        HAS_Q_NORM=step.q_norm is not None,
        HAS_K_NORM=step.k_norm is not None,
        SATURATES=step.key_cache.dtype == torch.float8_e4m3fn,
        BLOCK_H=4 * warps,
        BLOCK_D=triton.next_power_of_2(head_dim // 2),
        num_warps=warps,
        **early_options(qkv.device),
    )
    return query


# Up to here a program of one warp each leaves the device room for all of them.
_FEW_ROWS = 64
