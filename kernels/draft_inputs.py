"""Inputs of draft heads (EAGLE, MTP, parallel drafting) between the target's verification and the draft's forward.

    eagle_step_update_slot_mapping_and_metadata   next positions, KV slots and lengths (`drafting.step_inputs`)
    eagle_prepare_inputs_padded                   which row of each request is sampled, how many were rejected
    eagle_prepare_next_token_padded               the token that each request goes on with
    copy_and_expand_eagle_inputs                  inputs with room for new tokens (`drafting.expand_inputs`)
    extend_all_queries_by_N                       the attention metadata of inputs that have grown by N tokens each

None of them looks at a device's values from the host, so all can be captured in a CUDA graph.

Shapes: B requests, K drafts of a request; `query_start_loc` [B + 1] holds where the rows of each request start.
Source: operators and functions of the same names in vLLM's speculative decoding.
"""

# compile-time parameters of kernels are upper case
# ruff: noqa: N802, N803

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from outrider.kernels.argument_checks import check_at_least, check_columns, check_dtype, write_back
from outrider.kernels.backend import check_shape, jit, tl, triton, uses_triton
from outrider.kernels.drafting.expand_inputs import copy_and_expand_eagle_inputs
from outrider.kernels.drafting.step_inputs import PAD_SLOT, eagle_step_update_slot_mapping_and_metadata

__all__ = [
    "PAD_SLOT",
    "QueryMetadata",
    "copy_and_expand_eagle_inputs",
    "eagle_prepare_inputs_padded",
    "eagle_prepare_next_token_padded",
    "eagle_step_update_slot_mapping_and_metadata",
    "extend_all_queries_by_N",
]

_BLOCK = 128


def eagle_prepare_inputs_padded(
    cu_num_draft_tokens: torch.Tensor,
    valid_sampled_tokens_count: torch.Tensor,
    query_start_loc: torch.Tensor,
    token_indices_to_sample: torch.Tensor,
    num_rejected_tokens: torch.Tensor,
) -> None:
    """Write which row of each request the draft samples from, rejected rows left in place as padding.

    With nd the drafts of a request: rejected = nd + 1 - valid where nd > 0, otherwise 0, and the row is the request's
    last one minus the rejected ones, never before its first.

    Args:
        cu_num_draft_tokens: [B] int, inclusive cumulative sum of nd.
        valid_sampled_tokens_count: [B] int, accepted drafts plus one.
        query_start_loc: [B + 1] int.
        token_indices_to_sample: [B] int, written.
        num_rejected_tokens: [B] int, written.

    Raises:
        ValueError: an argument that does not fit, naming it, what was given and what is needed.
    """
    check_shape("cu_num_draft_tokens", cu_num_draft_tokens, ("B",))
    requests = cu_num_draft_tokens.shape[0]
    columns = {
        "cu_num_draft_tokens": (cu_num_draft_tokens, requests),
        "valid_sampled_tokens_count": (valid_sampled_tokens_count, requests),
        "query_start_loc": (query_start_loc, requests + 1),
        "token_indices_to_sample": (token_indices_to_sample, requests),
        "num_rejected_tokens": (num_rejected_tokens, requests),
    }
    check_columns("cu_num_draft_tokens", cu_num_draft_tokens.device, columns)
    if requests == 0:
        return
    inputs = (cu_num_draft_tokens, valid_sampled_tokens_count, query_start_loc)
    outputs = (token_indices_to_sample, num_rejected_tokens)
    written = [output.contiguous() for output in outputs]
    if uses_triton(cu_num_draft_tokens):
        grid = (triton.cdiv(requests, _BLOCK),)
        _prepare_inputs_kernel[grid](*(x.contiguous() for x in inputs), *written, requests, BLOCK=_BLOCK, num_warps=4)
    else:
        prepare_inputs_reference(inputs, written)
    write_back(outputs, written)


def prepare_inputs_reference(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
    """`eagle_prepare_inputs_padded` in plain torch; the operator's tensors to read and to write, in its order."""
    cu_num_draft_tokens, valid_sampled_tokens_count, query_start_loc = inputs
    token_indices_to_sample, num_rejected_tokens = outputs
    requests = len(cu_num_draft_tokens)
    drafts = cu_num_draft_tokens.long().diff(prepend=torch.zeros_like(cu_num_draft_tokens[:1], dtype=torch.int64))
    rejected = torch.where(drafts > 0, drafts + 1 - valid_sampled_tokens_count[:requests], 0)
    first, behind = query_start_loc[:requests].long(), query_start_loc[1 : requests + 1].long()
    num_rejected_tokens[:requests] = rejected.to(num_rejected_tokens.dtype)
    token_indices_to_sample[:requests] = (behind - 1 - rejected).maximum(first).to(token_indices_to_sample.dtype)


@jit
def _prepare_inputs_kernel(
    cu_num_draft_ptr,  # [B] int
    valid_count_ptr,  # [B] int
    query_start_ptr,  # [B + 1] int
    sample_row_ptr,  # [B] int
    rejected_ptr,  # [B] int
    requests,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = request < requests
    total = tl.load(cu_num_draft_ptr + request, mask=live, other=0).to(tl.int64)
    before = tl.load(cu_num_draft_ptr + request - 1, mask=live & (request > 0), other=0).to(tl.int64)
    valid = tl.load(valid_count_ptr + request, mask=live, other=0).to(tl.int64)
    first = tl.load(query_start_ptr + request, mask=live, other=0).to(tl.int64)
    behind = tl.load(query_start_ptr + request + 1, mask=live, other=0).to(tl.int64)
    drafts = total - before
    rejected = tl.where(drafts > 0, drafts + 1 - valid, 0)
    row = tl.maximum(behind - 1 - rejected, first)
    tl.store(sample_row_ptr + request, row.to(sample_row_ptr.dtype.element_ty), mask=live)
    tl.store(rejected_ptr + request, rejected.to(rejected_ptr.dtype.element_ty), mask=live)


def eagle_prepare_next_token_padded(
    sampled_token_ids: torch.Tensor,
    discard_request_mask: torch.Tensor,
    backup_next_token_ids: torch.Tensor,
    next_token_ids: torch.Tensor,
    valid_sampled_tokens_count: torch.Tensor,
    vocab_size: int,
) -> None:
    """Write the last valid token of each row and how many are valid; the backup and 0 where none is.

    Args:
        sampled_token_ids: [B, K + 1] int; an id outside [0, vocab_size) is not valid.
        discard_request_mask: [B] bool, requests whose tokens do not count.
        backup_next_token_ids: [B] int.
        next_token_ids: [B] int, written.
        valid_sampled_tokens_count: [B] int, written.
        vocab_size: V.

    Raises:
        ValueError: an argument that does not fit, naming it, what was given and what is needed.
    """
    check_shape("sampled_token_ids", sampled_token_ids, ("B", "K + 1"))
    check_dtype("sampled_token_ids", sampled_token_ids)
    check_at_least("vocab_size", vocab_size, 1)
    requests = sampled_token_ids.shape[0]
    columns = {
        "discard_request_mask": (discard_request_mask, requests),
        "backup_next_token_ids": (backup_next_token_ids, requests),
        "next_token_ids": (next_token_ids, requests),
        "valid_sampled_tokens_count": (valid_sampled_tokens_count, requests),
    }
    check_columns("sampled_token_ids", sampled_token_ids.device, columns)
    if requests == 0:
        return
    outputs = (next_token_ids, valid_sampled_tokens_count)
    written = [output.contiguous() for output in outputs]
    run = _launch_next_token if uses_triton(sampled_token_ids) else prepare_next_token_reference
    run(sampled_token_ids, discard_request_mask, backup_next_token_ids, vocab_size, written)
    write_back(outputs, written)


def prepare_next_token_reference(
    sampled_token_ids: torch.Tensor,
    discard_request_mask: torch.Tensor,
    backup_next_token_ids: torch.Tensor,
    vocab_size: int,
    outputs: Sequence[torch.Tensor],
) -> None:
    """`eagle_prepare_next_token_padded` in plain torch; `outputs` are next tokens and counts."""
    next_token_ids, valid_sampled_tokens_count = outputs
    requests, columns = sampled_token_ids.shape
    valid = (sampled_token_ids >= 0) & (sampled_token_ids < vocab_size) & ~discard_request_mask[:requests, None]
    # The backup stands before the row, so that it is the last valid one where the row holds none.
    row = torch.cat([backup_next_token_ids[:requests, None].long(), sampled_token_ids.long()], 1)
    number = torch.arange(1, columns + 1, device=valid.device)
    last = torch.nn.functional.pad(torch.where(valid, number, 0), (1, 0)).amax(1)
    next_token_ids[:requests] = row.gather(1, last[:, None]).squeeze(1).to(next_token_ids.dtype)
    valid_sampled_tokens_count[:requests] = valid.sum(1).to(valid_sampled_tokens_count.dtype)


def _launch_next_token(
    sampled_token_ids: torch.Tensor,
    discard_request_mask: torch.Tensor,
    backup_next_token_ids: torch.Tensor,
    vocab_size: int,
    outputs: Sequence[torch.Tensor],
) -> None:
    requests, columns = sampled_token_ids.shape
    block = max(triton.next_power_of_2(columns), 16)
    rows = max(1024 // block, 1)
    _next_token_kernel[(triton.cdiv(requests, rows),)](
        sampled_token_ids,
        discard_request_mask.contiguous().view(torch.uint8),
        backup_next_token_ids.contiguous(),
        *outputs,
        *sampled_token_ids.stride(),
        requests,
        columns,
        vocab_size,
        R=rows,
        C=block,
        num_warps=4,
    )


@jit
def _next_token_kernel(
    sampled_ptr,  # [B, K + 1] int
    discard_ptr,  # [B] uint8
    backup_ptr,  # [B] int
    next_token_ptr,  # [B] int
    count_ptr,  # [B] int
    row_stride,
    column_stride,
    requests,
    columns,
    vocab_size,
    R: tl.constexpr,
    C: tl.constexpr,
):
    request = tl.program_id(0) * R + tl.arange(0, R)
    column = tl.arange(0, C)
    live = request < requests
    discarded = tl.load(discard_ptr + request, mask=live, other=1) != 0
    backup = tl.load(backup_ptr + request, mask=live, other=0).to(tl.int64)
    place = request.to(tl.int64)[:, None] * row_stride + column[None, :] * column_stride
    inside = live[:, None] & (column < columns)[None, :]
    token = tl.load(sampled_ptr + place, mask=inside, other=-1).to(tl.int64)
    valid = (token >= 0) & (token < vocab_size) & (discarded == 0)[:, None]
    count = tl.sum(valid.to(tl.int32), axis=1)
    last = tl.max(tl.where(valid, column[None, :], -1), axis=1)
    token = tl.sum(tl.where(column[None, :] == last[:, None], token, 0), axis=1)
    token = tl.where(last >= 0, token, backup)
    tl.store(next_token_ptr + request, token.to(next_token_ptr.dtype.element_ty), mask=live)
    tl.store(count_ptr + request, count.to(count_ptr.dtype.element_ty), mask=live)


@dataclass(frozen=True, kw_only=True)
class QueryMetadata:
    """Attention metadata of the B queries of one forward.

    Attributes:
        query_start_loc: [B + 1] int, where the rows of each query start.
        seq_lens: [B] int, KV length of each request, its query included.
        num_actual_tokens: rows of all queries.
        max_query_len: rows of the longest query.
        max_seq_len: the longest of `seq_lens`.
        slot_mapping: [num_actual_tokens] int, the KV slot of each row.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    slot_mapping: torch.Tensor


def extend_all_queries_by_N(
    metadata: QueryMetadata, N: int, arange: torch.Tensor, new_slot_mapping: torch.Tensor
) -> QueryMetadata:
    """The metadata of the same queries with N rows more each; `metadata` is not changed.

    Args:
        metadata: of the queries as they are.
        N: rows that every query gains.
        arange: 0, 1, 2, .., at least B + 1 of them, on the device of `query_start_loc`.
        new_slot_mapping: [num_actual_tokens + B * N] int.

    Raises:
        ValueError: an argument that does not fit, naming it, what was given and what is needed.
    """
    check_at_least("N", N, 0)
    requests = metadata.seq_lens.shape[0]
    start = metadata.query_start_loc
    check_shape("metadata.query_start_loc", start, (requests + 1,))
    rows = metadata.num_actual_tokens + requests * N
    columns = {"arange": (arange, requests + 1), "new_slot_mapping": (new_slot_mapping, rows)}
    check_columns("metadata.query_start_loc", start.device, columns)
    return replace(
        metadata,
        query_start_loc=(start + arange[: requests + 1] * N).to(start.dtype),
        seq_lens=metadata.seq_lens + N,
        num_actual_tokens=rows,
        max_query_len=metadata.max_query_len + N,
        max_seq_len=metadata.max_seq_len + N,
        slot_mapping=new_slot_mapping,
    )
