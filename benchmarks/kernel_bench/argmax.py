"""The yardstick of sampling: a kernel that reads every logit once and keeps the largest, and nothing else."""

# compile-time parameters of kernels are upper case
# ruff: noqa: N803

from __future__ import annotations

import torch

from outrider.kernels.backend import jit, tl, triton

# Of 2 to 64 splits, blocks of 1,024 to 8,192 and 4 to 16 warps at 64 x 128,256 on an H200 none was faster by 2 %.
_SPLITS, _BLOCK, _WARPS = 16, 1024, 4


def argmax_only(logits: torch.Tensor) -> torch.Tensor:
    """The index of each row's largest logit, [T] int64; of equal ones any.

    Args:
        logits: [T, V] float32, rows contiguous.
    """
    rows, columns = logits.shape
    values = torch.empty(rows, _SPLITS, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(rows, _SPLITS, dtype=torch.int32, device=logits.device)
    chosen = torch.empty(rows, dtype=torch.int64, device=logits.device)
    part = triton.cdiv(triton.cdiv(columns, _SPLITS), 4) * 4
    _largest_of_part_kernel[(_SPLITS, rows)](
        logits, values, tokens, logits.stride(0), columns, part, SPLITS=_SPLITS, BLOCK=_BLOCK, num_warps=_WARPS
    )
    _largest_of_row_kernel[(rows,)](values, tokens, chosen, SPLITS=_SPLITS, num_warps=1)
    return chosen


@jit
def _largest_of_part_kernel(
    logits_ptr,  # [T, V] float32
    values_ptr,  # [T, SPLITS] float32
    tokens_ptr,  # [T, SPLITS] int32
    row_stride,
    columns,
    part,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    split = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    begin = split * part
    end = tl.minimum(begin + part, columns)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_token = tl.zeros([BLOCK], tl.int32) + begin
    for first in range(begin, end, BLOCK):
        token = first + tl.arange(0, BLOCK)
        value = tl.load(logits_ptr + row * row_stride + token, mask=token < end, other=float("-inf"))
        larger = value > best
        best = tl.where(larger, value, best)
        best_token = tl.where(larger, token, best_token)
    value, place = tl.max(best, axis=0, return_indices=True)
    token = tl.sum(tl.where(tl.arange(0, BLOCK) == place, best_token, 0))
    tl.store(values_ptr + row * SPLITS + split, value)
    tl.store(tokens_ptr + row * SPLITS + split, token)


@jit
def _largest_of_row_kernel(
    values_ptr,  # [T, SPLITS] float32
    tokens_ptr,  # [T, SPLITS] int32
    chosen_ptr,  # [T] int64
    SPLITS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    place = tl.argmax(tl.load(values_ptr + row * SPLITS + split), axis=0)
    tl.store(chosen_ptr + row, tl.load(tokens_ptr + row * SPLITS + place).to(tl.int64))
