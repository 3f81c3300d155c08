"""Input rows of an EAGLE-3 layer, in one pass: a token's embedding and a hidden row, each normed, side by side.

    e[t]    = table[token_ids[t]]
    pair[t] = [e[t] / sqrt(mean e[t]^2 + eps) * table_weight, hidden[t] / sqrt(mean hidden[t]^2 + eps) * hidden_weight]
    stream[t] = hidden[t], or its normed half of the pair

Everything between the tensors is float32, rounded once. A single row's step of a head is a dozen launches; this is one
in the place of five.

Shapes: T rows, N hidden sizes, V tokens.
Source: arXiv 2503.01840.
"""

# compile-time parameters of kernels are upper case
# ruff: noqa: N803

from __future__ import annotations

import torch

from outrider.kernels.argument_checks import FLOAT_DTYPES, INDEX_DTYPES, check_dense, check_tensors
from outrider.kernels.backend import jit, tl, triton, uses_triton
from outrider.kernels.early_launch import early_options
from outrider.kernels.linear.residual_norm import normed_block, residual_norm_reference

__all__ = ["paired_norm", "paired_norm_reference"]


def paired_norm(
    hidden: torch.Tensor,
    token_ids: torch.Tensor,
    table: torch.Tensor,
    *,
    table_weight: torch.Tensor,
    hidden_weight: torch.Tensor,
    eps: float,
    streams_normed: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows that the layer's attention reads, and those that it adds to.

    Args:
        hidden: [T, N] bfloat16, float16 or float32; not changed.
        token_ids: [T] int32 or int64 below V; a row whose token is out of range reads zeros on a GPU.
        table: [V, N] embeddings, in the dtype of `hidden`.
        table_weight: [N], float32 or the dtype of `hidden`, the factors of the embedding's norm.
        hidden_weight: [N], as `table_weight`, of the hidden row's.
        eps: added to the mean of squares.
        streams_normed: the stream is the normed hidden row.

    Returns:
        The stream [T, N] and the pair [T, 2 N], both new and in the dtype of `hidden`. A row's bits depend on nothing
        but the row.

    Raises:
        ValueError: a shape, dtype, device or stride that does not fit, naming the argument.
    """
    factors = (torch.float32, hidden.dtype)
    check_tensors(
        hidden=(hidden, ("T", "N"), FLOAT_DTYPES),
        token_ids=(token_ids, ("T",), INDEX_DTYPES),
        table=(table, ("V", "N"), (hidden.dtype,)),
        table_weight=(table_weight, ("N",), factors),
        hidden_weight=(hidden_weight, ("N",), factors),
    )
    check_dense(hidden=hidden, token_ids=token_ids, table=table, table_weight=table_weight, hidden_weight=hidden_weight)
    weights = {"table_weight": table_weight, "hidden_weight": hidden_weight}
    if not uses_triton(hidden):
        return paired_norm_reference(hidden, token_ids, table, **weights, eps=eps, streams_normed=streams_normed)
    rows, columns = hidden.shape
    stream, pair = hidden.new_empty(rows, columns), hidden.new_empty(rows, 2 * columns)
    if hidden.numel():
        block = triton.next_power_of_2(columns)
        _paired_norm_kernel[(rows,)](
            stream,
            pair,
            hidden,
            token_ids,
            table,
            table_weight,
            hidden_weight,
            hidden.stride(0),
            table.stride(0),
            table.shape[0],
            columns,
            eps,
            STREAMS_NORMED=streams_normed,
            BLOCK_N=block,
            # As of `residual_norm`, whose bits these are.
            num_warps=min(max(block // 512, 1), 16),
            **early_options(hidden.device),
        )
    return stream, pair


def paired_norm_reference(
    hidden: torch.Tensor,
    token_ids: torch.Tensor,
    table: torch.Tensor,
    *,
    table_weight: torch.Tensor,
    hidden_weight: torch.Tensor,
    eps: float,
    streams_normed: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`paired_norm` in plain torch, on any device."""
    embedded = torch.nn.functional.embedding(token_ids, table)
    normed = residual_norm_reference(hidden, None, hidden_weight, eps=eps)
    pair = torch.cat((residual_norm_reference(embedded, None, table_weight, eps=eps), normed), dim=1)
    return (normed if streams_normed else hidden.clone()), pair


@jit
def _paired_norm_kernel(
    stream_ptr,  # [T, N]
    pair_ptr,  # [T, 2 N]
    hidden_ptr,  # [T, N]
    token_ids_ptr,  # [T]
    table_ptr,  # [V, N]
    table_weight_ptr,  # [N]
    hidden_weight_ptr,  # [N]
    hidden_stride,
    table_stride,
    vocab,
    columns,
    eps,
    STREAMS_NORMED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EARLY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_N)
    kept = column < columns
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    table_weight = tl.load(table_weight_ptr + column, mask=kept, other=0).to(tl.float32)
    hidden_weight = tl.load(hidden_weight_ptr + column, mask=kept, other=0).to(tl.float32)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    hidden = tl.load(hidden_ptr + row * hidden_stride + column, mask=kept, other=0)
    token = tl.load(token_ids_ptr + row).to(tl.int64)
    known = kept & (token >= 0) & (token < vocab)
    embedded = tl.load(table_ptr + token * table_stride + column, mask=known, other=0).to(tl.float32)
    dtype = pair_ptr.dtype.element_ty
    normed = normed_block(hidden.to(tl.float32), hidden_weight, columns, eps).to(dtype)
    tl.store(pair_ptr + row * 2 * columns + column, normed_block(embedded, table_weight, columns, eps).to(dtype),
             mask=kept)  # fmt: skip
    tl.store(pair_ptr + row * 2 * columns + columns + column, normed, mask=kept)
    tl.store(stream_ptr + row * columns + column, normed if STREAMS_NORMED else hidden, mask=kept)
