"""Inputs of a draft head with room for new tokens: rejected rows stay as padding, so shapes never depend on verdicts.

Request r holds the rows qstart .. next_qstart - 1 of the target's input; qend is the last row that was not rejected.
Its rows become

    [ valid | bonus | parallel-draft masks x (npad - 1) | rejected ]

                        nvalid              input of valid row j    first output row
    shift (EAGLE)       qend - qstart       qstart + 1 + j          qstart + r * (npad - 1)
    no shift            qend - qstart + 1   qstart + j              qstart + r * npad

and nrejected = next_qstart - qend - 1. A draft head that shifts (EAGLE) is fed token i + 1 beside the target's hidden
state i, so the first token falls away and the bonus takes the last place.

Shapes: B requests, T input rows, npad new rows of a request. Malformed positions do no harm: nothing outside the given
tensors is read or written. Source: P-EAGLE's input expansion; operator of the same name in vLLM.
"""

# compile-time parameters of kernels are upper case
# ruff: noqa: N803

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.kernels.argument_checks import check_at_least, check_columns, write_back
from outrider.kernels.backend import check_shape, jit, tl, triton, uses_triton

__all__ = ["copy_and_expand_eagle_inputs", "copy_and_expand_reference"]

_BLOCK = 256


def copy_and_expand_eagle_inputs(
    target_token_ids: torch.Tensor,
    target_positions: torch.Tensor,
    next_token_ids: torch.Tensor,
    query_start_loc: torch.Tensor,
    query_end_loc: torch.Tensor,
    padding_token_id: int,
    parallel_drafting_token_id: int,
    num_padding_slots_per_request: int,
    shift_input_ids: bool,
    out_input_ids: torch.Tensor,
    out_positions: torch.Tensor,
    out_is_rejected_token_mask: torch.Tensor,
    out_is_masked_token_mask: torch.Tensor,
    out_new_token_indices: torch.Tensor,
    out_hidden_state_mapping: torch.Tensor | None,
) -> None:
    """Write the expanded rows of every request; rows past the last one keep what they hold.

    Positions count on from target_positions[qstart] over valid, bonus and masks; rejected rows get `padding_token_id`
    and position 0.

    Args:
        target_token_ids: [T] int.
        target_positions: [T] int.
        next_token_ids: [B] int, the bonus of each request.
        query_start_loc: [B + 1] int, qstart of each request and the end.
        query_end_loc: [B] int, qend.
        padding_token_id: token of rejected rows.
        parallel_drafting_token_id: token of the masks.
        num_padding_slots_per_request: npad, at least 1.
        shift_input_ids: whether the draft head shifts.
        out_input_ids: [rows] int, written; rows = query_start_loc[B] + B * (npad - 1) with shift, + B * npad without.
        out_positions: [rows] int, written.
        out_is_rejected_token_mask: [rows] bool, written.
        out_is_masked_token_mask: [rows] bool, written.
        out_new_token_indices: [B * npad] int, written: the rows of bonus and masks.
        out_hidden_state_mapping: [query_start_loc[B]] int, the output row of every input row; written with shift
            only, otherwise it may be None.

    Raises:
        ValueError: an argument that does not fit, naming it, what was given and what is needed. How many rows there
            are is checked on the CPU; on CUDA, stores past the end are left out.
    """
    check_shape("next_token_ids", next_token_ids, ("B",))
    check_at_least("num_padding_slots_per_request", num_padding_slots_per_request, 1)
    requests, slots = next_token_ids.shape[0], num_padding_slots_per_request
    growth = slots - 1 if shift_input_ids else slots
    if out_hidden_state_mapping is None:
        if shift_input_ids:
            raise ValueError("out_hidden_state_mapping: None given, a tensor needed with shift_input_ids")
        out_hidden_state_mapping = next_token_ids[:0]
    inputs = {
        "target_token_ids": (target_token_ids, 0),
        "target_positions": (target_positions, target_token_ids.numel()),
        "next_token_ids": (next_token_ids, requests),
        "query_start_loc": (query_start_loc, requests + 1),
        "query_end_loc": (query_end_loc, requests),
    }
    check_columns("next_token_ids", next_token_ids.device, inputs)
    rows = _input_rows(query_start_loc, requests, target_token_ids)
    expanded = 0 if rows is None else rows + requests * growth
    outputs = {
        "out_input_ids": (out_input_ids, expanded),
        "out_positions": (out_positions, expanded),
        "out_is_rejected_token_mask": (out_is_rejected_token_mask, expanded),
        "out_is_masked_token_mask": (out_is_masked_token_mask, expanded),
        "out_new_token_indices": (out_new_token_indices, requests * slots),
        "out_hidden_state_mapping": (out_hidden_state_mapping, (rows or 0) if shift_input_ids else 0),
    }
    check_columns("next_token_ids", next_token_ids.device, outputs)
    if requests == 0:
        return
    given = [tensor.contiguous() for tensor, _ in inputs.values()]
    targets = [tensor for tensor, _ in outputs.values()]
    written = [target.contiguous() for target in targets]
    run = _launch if uses_triton(next_token_ids) else copy_and_expand_reference
    run(given, padding_token_id, parallel_drafting_token_id, slots, shift_input_ids, written)
    write_back(targets, written)


def _input_rows(query_start_loc: torch.Tensor, requests: int, target_token_ids: torch.Tensor) -> int | None:
    """query_start_loc[B], which only a CPU tensor tells without waiting for a device; it must not pass T."""
    if query_start_loc.is_cuda:
        return None
    rows = int(query_start_loc[requests])
    check_at_least("target_token_ids size", target_token_ids.numel(), rows)
    return rows


def copy_and_expand_reference(
    inputs: Sequence[torch.Tensor],
    padding_token_id: int,
    parallel_drafting_token_id: int,
    slots: int,
    shift: bool,
    outputs: Sequence[torch.Tensor],
) -> None:
    """`copy_and_expand_eagle_inputs` in plain torch, one request after the other.

    Args:
        inputs: the operator's five tensors to read, in its order.
        padding_token_id: token of rejected rows.
        parallel_drafting_token_id: token of the masks.
        slots: npad.
        shift: whether the draft head shifts.
        outputs: the operator's six tensors to write, in its order.
    """
    tokens, positions, bonus, query_start, query_end = inputs
    out_ids, out_positions, out_rejected, out_masked, out_new, out_mapping = outputs
    # What lies further out is as far outside as anything, and sums of it stay within int64.
    starts, ends = (column.long().clamp(-(2**60), 2**60).tolist() for column in (query_start, query_end))
    for request, end in enumerate(ends[: len(bonus)]):
        start, behind = starts[request : request + 2]
        valid = max(end - start + (not shift), 0)
        begin = start + request * (slots - shift)
        rejected = max(behind - end - 1, 0)
        rows = _between(begin, min(begin + valid + slots + rejected, _common_size(outputs)))
        place = rows - begin
        kept = place < valid + slots
        is_mask = kept & (place > valid)
        source = (start + shift + place).clamp(0, max(len(tokens) - 1, 0))
        ids = tokens[source].long() if len(tokens) else torch.zeros_like(rows)
        ids = ids.where(place < valid, int(bonus[request])).where(~is_mask, parallel_drafting_token_id)
        first = int(positions[min(max(start, 0), len(tokens) - 1)]) if len(tokens) else 0
        out_ids[rows] = ids.where(kept, padding_token_id).to(out_ids.dtype)
        out_positions[rows] = (first + place).where(kept, 0).to(out_positions.dtype)
        out_rejected[rows] = ~kept
        out_masked[rows] = is_mask
        new = torch.arange(slots)
        out_new[request * slots + new] = (begin + valid + new).to(out_new.dtype)
        if shift:
            own = _between(start, min(behind, len(out_mapping)))
            out_mapping[own] = (own - start + begin).to(out_mapping.dtype)


def _between(first: int, end: int) -> torch.Tensor:
    """The indices from `first` to `end`, those below 0 left out."""
    return torch.arange(max(first, 0), max(first, 0, end))


def _common_size(outputs: Sequence[torch.Tensor]) -> int:
    """Rows that all four row outputs have."""
    return min(len(output) for output in outputs[:4])


def _launch(
    inputs: Sequence[torch.Tensor],
    padding_token_id: int,
    parallel_drafting_token_id: int,
    slots: int,
    shift: bool,
    outputs: Sequence[torch.Tensor],
) -> None:
    out_ids, out_positions, out_rejected, out_masked, out_new, out_mapping = outputs
    requests, rows = inputs[2].shape[0], _common_size(outputs)
    # How long a request is only the device knows: as many programs each as requests of equal length would need.
    programs = min(max(triton.cdiv(rows, requests * _BLOCK), 1), 64)
    _expand_kernel[(requests, programs)](
        *inputs,
        out_ids,
        out_positions,
        out_rejected.view(torch.uint8),
        out_masked.view(torch.uint8),
        out_new,
        out_mapping,
        inputs[0].shape[0],
        rows,
        out_mapping.shape[0],
        padding_token_id,
        parallel_drafting_token_id,
        slots,
        programs,
        SHIFT=int(shift),
        BLOCK=_BLOCK,
        num_warps=4,
    )


@jit
def _clamped(value, most):
    return tl.minimum(tl.maximum(value, 0), most)


@jit
def _expand_kernel(
    tokens_ptr,  # [T] int
    positions_ptr,  # [T] int
    bonus_ptr,  # [B] int
    query_start_ptr,  # [B + 1] int
    query_end_ptr,  # [B] int
    out_ids_ptr,  # [rows] int
    out_positions_ptr,  # [rows] int
    out_rejected_ptr,  # [rows] uint8
    out_masked_ptr,  # [rows] uint8
    out_new_ptr,  # [B * npad] int
    out_mapping_ptr,  # [mapping_size] int
    input_rows,
    rows,
    mapping_size,
    padding_token_id,
    parallel_drafting_token_id,
    slots,
    programs,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0)
    part = tl.program_id(1) * BLOCK
    lane = tl.arange(0, BLOCK)
    start = tl.load(query_start_ptr + request).to(tl.int64)
    behind = tl.load(query_start_ptr + request + 1).to(tl.int64)
    end = tl.load(query_end_ptr + request).to(tl.int64)
    bonus = tl.load(bonus_ptr + request).to(tl.int64)
    valid = tl.maximum(end - start + (1 - SHIFT), 0)
    begin = start + request.to(tl.int64) * (slots - SHIFT)
    total = valid + slots + tl.maximum(behind - end - 1, 0)
    first = tl.load(positions_ptr + _clamped(start, input_rows - 1), mask=input_rows > 0, other=0).to(tl.int64)
    # Both ends lie in [0, rows], so the loops end whatever the positions are.
    for row_start in range(_clamped(begin, rows) + part, tl.minimum(begin + total, rows), programs * BLOCK):
        row = row_start + lane
        place = row - begin
        kept = place < valid + slots
        is_mask = kept & (place > valid)
        live = (place < total) & (row < rows)
        source = _clamped(start + SHIFT + place, input_rows - 1)
        ids = tl.load(tokens_ptr + source, mask=live & (place < valid) & (input_rows > 0), other=0).to(tl.int64)
        ids = tl.where(place == valid, bonus, ids)
        ids = tl.where(is_mask, parallel_drafting_token_id, tl.where(kept, ids, padding_token_id))
        position = tl.where(kept, first + place, 0)
        tl.store(out_ids_ptr + row, ids.to(out_ids_ptr.dtype.element_ty), mask=live)
        tl.store(out_positions_ptr + row, position.to(out_positions_ptr.dtype.element_ty), mask=live)
        tl.store(out_rejected_ptr + row, (kept == 0).to(tl.uint8), mask=live)
        tl.store(out_masked_ptr + row, is_mask.to(tl.uint8), mask=live)
    if SHIFT:
        for own_start in range(
            _clamped(start, mapping_size) + part, tl.minimum(behind, mapping_size), programs * BLOCK
        ):
            own = own_start + lane
            row = (own - start + begin).to(out_mapping_ptr.dtype.element_ty)
            tl.store(out_mapping_ptr + own, row, mask=(own < behind) & (own < mapping_size))
    for new_start in range(part, slots, programs * BLOCK):
        new = new_start + lane
        row = (begin + valid + new).to(out_new_ptr.dtype.element_ty)
        tl.store(out_new_ptr + request.to(tl.int64) * slots + new, row, mask=new < slots)
