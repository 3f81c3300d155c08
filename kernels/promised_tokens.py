"""Tokens that the step before chose, filled in on the device: the host launches a step before it has read them.

    token_ids[t] = max(chosen[-1 - token_ids[t]], 0)   where token_ids[t] < 0

Where nothing was chosen (-1, or no such row) the token is 0: whoever launched the step drops what comes of it.

Shapes: T rows of the step, N rows of the one before.
"""

# compile-time parameters of kernels are upper case
# ruff: noqa: N803, PLR0917

from __future__ import annotations

import torch

from outrider.kernels.argument_checks import check_dtype, check_place
from outrider.kernels.backend import check_shape, jit, tl, triton, uses_triton

__all__ = ["fill_promised_tokens", "fill_promised_tokens_reference"]

# Rows that a program looks at.
_BLOCK = 128


def fill_promised_tokens(token_ids: torch.Tensor, chosen: torch.Tensor) -> None:
    """Replace every -1 - r by the token that was chosen in row r.

    Args:
        token_ids: [T] int64, written where it is negative.
        chosen: [N] int32; -1 where there is none.

    Raises:
        ValueError: a shape, dtype or device that does not fit, naming the argument.
    """
    check_shape("token_ids", token_ids, ("T",))
    check_dtype("token_ids", token_ids, (torch.int64,))
    check_shape("chosen", chosen, ("N",))
    check_dtype("chosen", chosen, (torch.int32,))
    check_place("chosen", chosen, token_ids.device, "token_ids")
    rows = token_ids.shape[0]
    if not uses_triton(token_ids):
        fill_promised_tokens_reference(token_ids, chosen)
    elif rows:
        _fill_promised_tokens_kernel[(triton.cdiv(rows, _BLOCK),)](
            token_ids,
            chosen,
            token_ids.stride(0),
            chosen.stride(0),
            rows,
            chosen.shape[0],
            BLOCK=_BLOCK,
            num_warps=4,
        )


def fill_promised_tokens_reference(token_ids: torch.Tensor, chosen: torch.Tensor) -> None:
    """`fill_promised_tokens` in plain torch."""
    promised = token_ids < 0
    row = -1 - token_ids[promised]
    known = row < chosen.shape[0]
    found = torch.zeros_like(row)
    found[known] = chosen[row[known]].long().clamp(min=0)
    token_ids[promised] = found


@jit
def _fill_promised_tokens_kernel(
    token_ids_ptr,  # [T] int64
    chosen_ptr,  # [N] int32
    token_stride,
    chosen_stride,
    rows,
    chosen_rows,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(token_ids_ptr + row.to(tl.int64) * token_stride, mask=row < rows, other=0)
    promised = token < 0
    source = -1 - token
    known = promised & (source < chosen_rows)
    found = tl.load(chosen_ptr + source * chosen_stride, mask=known, other=0).to(tl.int64)
    tl.store(token_ids_ptr + row.to(tl.int64) * token_stride, tl.maximum(found, 0), mask=promised)
