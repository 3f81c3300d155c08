"""The sum over ranks of what every rank holds in parts, through memory that the GPUs of one host share.

    letter[r]  = sum_p parts of rank r [p]                        added in float32, rounded once if at all
    returned   = letter[0], letter[1], ... letter[W - 1]          on every rank

A rank writes its letter straight into every rank's mailbox: one trip over NVLink. Whoever reads the letters adds them
in the order of the ranks, in float32, as it adds the parts of a split product on one GPU (`residual_norm`), so all
ranks come to the same bits in every run. There are two ways to say that a letter is complete:

    small letters    every number travels in one word with the count of the calls so far, and the receiver waits for
                     that count in each word: nothing waits for what was sent to have arrived
    large letters    a program sends its part, waits until it is there, and then writes the count beside it

`gather_columns` brings the columns of a matrix that ranks hold side by side to rank 0 in the second way.

A count only grows, and so never has to be taken back. Two inboxes take turns: who writes a letter has had the answer
to the one before, which the other rank gave after it had read the inbox that is now written. A step must therefore
exchange an even number of letters.

Shapes: W ranks, P parts, T rows, N hidden sizes, R rows and v columns of logits.
Sources: one-shot all-reduce, as in TensorRT-LLM and FlashInfer (these fetch, this one sends); NCCL's LL protocol for
small letters.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.kernels.argument_checks import check_dtype, check_place
from outrider.kernels.backend import check_shape
from outrider.kernels.collectives.all_reduce_kernels import launch_exchange, launch_gather
from outrider.kernels.collectives.mailbox import Mailbox, MailboxLayout

__all__ = [
    "Mailbox",
    "MailboxLayout",
    "exchange_parts",
    "exchange_parts_reference",
    "gather_columns",
    "gather_columns_reference",
]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def exchange_parts(parts: torch.Tensor, mailbox: Mailbox, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Every rank's sum of its parts, once all ranks have called this with parts of the same size.

    Args:
        parts: [P, T, N] bfloat16, float16 or float32, each part contiguous.
        mailbox: of this rank.
        dtype: of the letters; by default that of `parts`.

    Returns:
        [W, T, N] in that dtype, a view of the mailbox that stands until the next call but one.

    Raises:
        ValueError: a shape, dtype, device or stride that does not fit, or parts larger than the mailbox takes.
    """
    check_shape("parts", parts, ("P", "T", "N"))
    check_dtype("parts", parts, _DTYPES)
    dtype = dtype or parts.dtype
    check_place("parts", parts, mailbox.memory.device, "mailbox")
    if not parts[0].is_contiguous():
        raise ValueError(f"parts: strides {parts.stride()} given, contiguous parts needed")
    count = parts[0].numel()
    if not mailbox.takes_letter(count, dtype):
        raise ValueError(f"parts: {count} numbers each given, the mailbox takes "
                         f"{mailbox.layout.letter_bytes // dtype.itemsize}")  # fmt: skip
    inbox = mailbox.next_inbox(count, dtype)
    if count:
        launch_exchange(parts, inbox, mailbox)
    return inbox.letters.view(mailbox.world_size, *parts.shape[1:])


def exchange_parts_reference(parts: Sequence[torch.Tensor], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return the result of `exchange_parts` where rank r gives parts[r], [P, T, N] each, in plain torch."""
    return torch.stack([rank_parts.float().sum(0).to(dtype or rank_parts.dtype) for rank_parts in parts])


def gather_columns(columns: torch.Tensor, mailbox: Mailbox) -> torch.Tensor:
    """The matrix of all ranks' columns at rank 0, once all ranks have called this with columns of the same size.

    Args:
        columns: [R, v] bfloat16, float16 or float32, contiguous.
        mailbox: of this rank.

    Returns:
        [R, W v], a view of the mailbox that stands until the next call; on other ranks than 0 its content is void.

    Raises:
        ValueError: a shape, dtype, device or stride that does not fit, or a matrix larger than the mailbox takes.
    """
    check_shape("columns", columns, ("R", "v"))
    check_dtype("columns", columns, _DTYPES)
    check_place("columns", columns, mailbox.memory.device, "mailbox")
    if not columns.is_contiguous():
        raise ValueError(f"columns: strides {columns.stride()} given, a contiguous matrix needed")
    rows, width = columns.shape[0], columns.shape[1] * mailbox.world_size
    if not mailbox.takes_columns(rows, width, columns.dtype):
        raise ValueError(f"columns: a matrix [{rows}, {width}] asked for, the mailbox takes "
                         f"{mailbox.layout.gathered_bytes} bytes")  # fmt: skip
    start = mailbox.layout.gathered_start
    gathered = mailbox.memory[start : start + rows * width * columns.element_size()].view(columns.dtype)
    if gathered.numel():
        launch_gather(columns, gathered, mailbox)
    return gathered.view(rows, width)


def gather_columns_reference(columns: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the result of `gather_columns` where rank r gives columns[r], [R, v] each, in plain torch."""
    return torch.cat(list(columns), dim=1)
