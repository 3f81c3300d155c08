"""One autoregressive step of a draft head: where every request's next token stands and where its KV goes.

With new = position + 1:

    new >= max_model_len    position 0, no slot, length 1: the request idles
    otherwise               position new, length min(length + 1, max_model_len), slot
                            block_table[r, min(new // block_size, blocks - 1)] * block_size + new % block_size,
                            and no slot where new < 0

Shapes: B requests, `blocks` KV blocks of a request. Source: function of the same name in vLLM's speculative decoding.
"""

# compile-time parameters of kernels are upper case
# ruff: noqa: N803

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.kernels.argument_checks import check_at_least, check_columns, check_dtype, check_place, write_back
from outrider.kernels.backend import check_shape, jit, tl, triton, uses_triton

__all__ = ["PAD_SLOT", "eagle_step_reference", "eagle_step_update_slot_mapping_and_metadata"]

PAD_SLOT = -1
"""The slot of a row whose KV is not kept."""
_PAD_SLOT = tl.constexpr(PAD_SLOT)
_BLOCK = 128


def eagle_step_update_slot_mapping_and_metadata(
    positions_1d: torch.Tensor,
    block_table_tensor: torch.Tensor,
    seq_lens: torch.Tensor,
    block_size: int,
    max_model_len: int,
    out_clamped_positions: torch.Tensor,
    out_slot_mapping: torch.Tensor,
    input_batch_size: int | None = None,
) -> None:
    """Move every request one token on; a request that would pass `max_model_len` idles at position 0.

    Rows from B to input_batch_size, the padding of a CUDA graph, get no slot and nothing else.

    Args:
        positions_1d: [B] int.
        block_table_tensor: [B, blocks] int, the KV blocks of each request.
        seq_lens: [B] int, changed in place.
        block_size: slots of a KV block.
        max_model_len: most tokens of a request.
        out_clamped_positions: [B] int, written; may be `positions_1d`.
        out_slot_mapping: [input_batch_size] int, written; -1 for no slot.
        input_batch_size: rows of the graph, B by default.

    Raises:
        ValueError: an argument that does not fit, naming it, what was given and what is needed.
    """
    check_shape("positions_1d", positions_1d, ("B",))
    requests = positions_1d.shape[0]
    rows = requests if input_batch_size is None else input_batch_size
    check_at_least("input_batch_size", rows, requests)
    check_at_least("block_size", block_size, 1)
    check_at_least("max_model_len", max_model_len, 1)
    check_shape("block_table_tensor", block_table_tensor, ("B", "blocks"))
    check_at_least("block_table_tensor rows", block_table_tensor.shape[0], requests)
    check_at_least("block_table_tensor columns", block_table_tensor.shape[1], 1)
    check_dtype("block_table_tensor", block_table_tensor)
    check_place("block_table_tensor", block_table_tensor, positions_1d.device, "positions_1d")
    columns = {
        "positions_1d": (positions_1d, requests),
        "seq_lens": (seq_lens, requests),
        "out_clamped_positions": (out_clamped_positions, requests),
        "out_slot_mapping": (out_slot_mapping, rows),
    }
    check_columns("positions_1d", positions_1d.device, columns)
    if rows == 0:
        return
    outputs = (seq_lens, out_clamped_positions, out_slot_mapping)
    written = [output.contiguous() for output in outputs]
    run = _launch_step if uses_triton(positions_1d) else eagle_step_reference
    run(positions_1d.contiguous(), block_table_tensor, block_size, max_model_len, written, rows)
    write_back(outputs, written)


def eagle_step_reference(
    positions: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    max_model_len: int,
    outputs: Sequence[torch.Tensor],
    rows: int,
) -> None:
    """`eagle_step_update_slot_mapping_and_metadata` in plain torch.

    Args:
        positions: [B] int.
        block_table: [B, blocks] int.
        block_size: slots of a KV block.
        max_model_len: most tokens of a request.
        outputs: lengths, changed in place, positions and slots, written.
        rows: rows of the graph.
    """
    seq_lens, out_positions, out_slots = outputs
    requests, blocks = len(positions), block_table.shape[1]
    new = positions.long() + 1
    ended = new >= max_model_len
    place = (new // block_size).clamp(0, blocks - 1)
    block = block_table[:requests].gather(1, place[:, None]).squeeze(1).long()
    lengths = seq_lens[:requests]
    out_positions[:requests] = torch.where(ended, 0, new).to(out_positions.dtype)
    out_slots[:rows] = PAD_SLOT
    slots = block * block_size + new % block_size
    out_slots[:requests] = torch.where(ended | (new < 0), PAD_SLOT, slots).to(out_slots.dtype)
    lengths.copy_(torch.where(ended, 1, (lengths.long() + 1).clamp(max=max_model_len)))


def _launch_step(
    positions: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    max_model_len: int,
    outputs: Sequence[torch.Tensor],
    rows: int,
) -> None:
    seq_lens, out_positions, out_slots = outputs
    _step_kernel[(triton.cdiv(rows, _BLOCK),)](
        positions,
        block_table,
        seq_lens,
        out_positions,
        out_slots,
        *block_table.stride(),
        positions.shape[0],
        rows,
        block_table.shape[1],
        block_size,
        max_model_len,
        BLOCK=_BLOCK,
        num_warps=4,
    )


@jit
def _step_kernel(
    positions_ptr,  # [B] int
    block_table_ptr,  # [B, blocks] int
    seq_lens_ptr,  # [B] int
    out_positions_ptr,  # [B] int
    out_slots_ptr,  # [rows] int
    table_row_stride,
    table_stride,
    requests,
    rows,
    blocks,
    block_size,
    max_model_len,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = row < requests
    new = tl.load(positions_ptr + row, mask=live, other=-1).to(tl.int64) + 1
    length = tl.load(seq_lens_ptr + row, mask=live, other=0).to(tl.int64) + 1
    ended = new >= max_model_len
    placed = live & (new >= 0) & (new < max_model_len)
    place = tl.minimum(new // block_size, blocks - 1)
    block = tl.load(block_table_ptr + row.to(tl.int64) * table_row_stride + place * table_stride, mask=placed, other=0)
    slot = tl.where(placed, block.to(tl.int64) * block_size + new % block_size, _PAD_SLOT)
    position = tl.where(ended, 0, new)
    length = tl.where(ended, 1, tl.minimum(length, max_model_len))
    tl.store(out_positions_ptr + row, position.to(out_positions_ptr.dtype.element_ty), mask=live)
    tl.store(out_slots_ptr + row, slot.to(out_slots_ptr.dtype.element_ty), mask=row < rows)
    tl.store(seq_lens_ptr + row, length.to(seq_lens_ptr.dtype.element_ty), mask=live)
