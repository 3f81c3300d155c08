"""Leaves each row of logits only the tokens that a grammar allows next, given as bits.

For the m-th mask, of row r = rows[m], and every token v:

    bit v % 32 of masks[m, v // 32] is 0, or v // 32 >= W:   logits[r, v] = -inf

What comes before and after it in the order of processors is in `outrider.kernels.processors`; which bits are set is
`outrider.grammar`'s to say. Nothing of a logit is read: what is kept stays untouched.

Shapes: T rows, V vocabulary size, M masks, W words of 32 tokens.
"""

# compile-time parameters of kernels are upper case
# ruff: noqa: N803

from __future__ import annotations

import torch

from outrider.kernels.argument_checks import check_tensors
from outrider.kernels.backend import jit, tl, triton, uses_triton

_WORD = 32
_MOST_TOKENS = 2048


def apply_grammar_masks(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
    """Set the logits of tokens that are not allowed to -inf, in place.

    Args:
        logits: [T, V] float32, changed.
        rows: [M] int32, the row that each mask is of; those outside [0, T) are skipped.
        masks: [M, W] int32, the bits of the allowed tokens.

    Raises:
        ValueError: a shape, dtype or device that does not fit, naming the argument.
    """
    check_tensors(
        logits=(logits, ("T", "V"), (torch.float32,)),
        rows=(rows, ("M",), (torch.int32,)),
        masks=(masks, ("M", "W"), (torch.int32,)),
    )
    if not rows.shape[0] or not logits.numel():
        return
    if uses_triton(logits):
        _launch(logits, rows, masks)
    else:
        apply_grammar_masks_reference(logits, rows, masks)


def apply_grammar_masks_reference(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
    """`apply_grammar_masks` in plain torch."""
    height, vocab_size = logits.shape
    bits = torch.arange(_WORD, dtype=torch.int32, device=logits.device)
    allowed = ((masks[:, :, None] >> bits) & 1).bool().flatten(1)[:, :vocab_size]
    allowed = torch.nn.functional.pad(allowed, (0, vocab_size - allowed.shape[1]))
    inside = (rows >= 0) & (rows < height)
    index = rows[inside].long()
    logits[index] = logits[index].masked_fill(~allowed[inside], -torch.inf)


def _launch(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
    height, vocab_size = logits.shape
    block = max(_WORD, min(triton.next_power_of_2(vocab_size), _MOST_TOKENS))
    _mask_kernel[(rows.shape[0], triton.cdiv(vocab_size, block))](
        logits,
        *logits.stride(),
        height,
        vocab_size,
        rows.contiguous(),
        masks.contiguous(),
        masks.shape[1],
        WORD=_WORD,
        BLOCK=block,
    )


@jit
def _mask_kernel(
    logits_ptr,  # [T, V] float32
    row_stride,
    stride,
    height,  # T
    vocab_size,  # V
    rows_ptr,  # [M] int32
    masks_ptr,  # [M, W] int32
    words,  # W
    WORD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    mask = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + mask).to(tl.int64)
    if (row < 0) | (row >= height):
        return
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = token // WORD
    word = tl.load(masks_ptr + mask * words + place, mask=place < words, other=0)
    # An arithmetic shift brings ones from the left, which the last bit does not see.
    banned = ((word >> (token % WORD)) & 1) == 0
    tl.store(
        logits_ptr + row * row_stride + token.to(tl.int64) * stride,
        tl.full([BLOCK], float("-inf"), tl.float32),
        mask=banned & (token < vocab_size),
    )
