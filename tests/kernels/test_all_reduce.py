"""The ranks stand in one process here: what the later ones will say is written into the mailboxes beforehand."""

from __future__ import annotations

import pytest
import torch

from outrider.kernels.all_reduce import (
    PROGRAMS,
    Mailbox,
    MailboxLayout,
    exchange_parts,
    exchange_parts_reference,
    gather_columns,
    gather_columns_reference,
)


def _mailboxes(device: torch.device, world_size: int) -> list[Mailbox]:
    layout = MailboxLayout(world_size=world_size, letter_bytes=1 << 12, gathered_bytes=1 << 12)
    memories = [torch.zeros(layout.total_bytes, dtype=torch.uint8, device=device) for _ in range(world_size)]
    addresses = [memory.data_ptr() for memory in memories]
    return [Mailbox(layout, rank=rank, memory=memory, addresses=addresses) for rank, memory in enumerate(memories)]


def _numbers(mailbox: Mailbox) -> torch.Tensor:
    """[kinds, W, PROGRAMS]."""
    numbers = mailbox.memory[: mailbox.layout.numbers_bytes].view(torch.int64)
    return numbers.view(-1, mailbox.world_size, PROGRAMS)


@pytest.mark.parametrize(("parts", "dtype"), [(1, torch.bfloat16), (3, torch.float32)])
def test_every_rank_gets_every_letter(triton_device: torch.device, parts: int, dtype: torch.dtype) -> None:
    mailboxes = _mailboxes(triton_device, 3)
    for call in (1, 2, 3):
        held = [torch.randn(parts, 3, 208, device=triton_device).to(dtype) for _ in mailboxes]
        for mailbox in mailboxes:
            _numbers(mailbox)[0, mailbox.rank + 1 :] = call
        letters = [exchange_parts(rank_parts, box) for rank_parts, box in zip(held, mailboxes, strict=True)]
        for received, mailbox in zip(letters, mailboxes, strict=True):
            torch.testing.assert_close(received, exchange_parts_reference(held), rtol=0, atol=0)
            others = [rank for rank in range(3) if rank != mailbox.rank]
            # 624 numbers are two programs' work; each has told its twins of every call so far.
            assert (_numbers(mailbox)[0, others, :2] == call).all()


def test_two_letters_in_a_row_do_not_meet(triton_device: torch.device) -> None:
    mailboxes = _mailboxes(triton_device, 2)
    _numbers(mailboxes[0])[0] = 1
    first, second = (torch.full((1, 2, 16), value, device=triton_device) for value in (1.0, 2.0))
    held = exchange_parts(first, mailboxes[0])
    exchange_parts(first, mailboxes[1])
    _numbers(mailboxes[1])[0] = 2
    exchange_parts(second, mailboxes[1])
    assert (held == 1).all()


def test_columns_come_together_at_rank_0(triton_device: torch.device) -> None:
    mailboxes = _mailboxes(triton_device, 2)
    held = [torch.randn(5, 48, device=triton_device) for _ in mailboxes]
    # Rank 0 waits for the others: here they come first.
    gather_columns(held[1], mailboxes[1])
    gathered = gather_columns(held[0], mailboxes[0])
    torch.testing.assert_close(gathered, gather_columns_reference(held), rtol=0, atol=0)


def test_who_was_stopped_does_not_wait(triton_device: torch.device) -> None:
    mailbox = _mailboxes(triton_device, 2)[0]
    mailbox.stopped.fill_(1)
    exchange_parts(torch.ones(1, 1, 16, device=triton_device), mailbox)
    if triton_device.type == "cuda":
        torch.cuda.synchronize()


def test_what_does_not_fit_is_named() -> None:
    mailbox = _mailboxes(torch.device("cpu"), 2)[0]
    with pytest.raises(ValueError, match="parts: 2048 numbers each given, the mailbox takes 1024"):
        exchange_parts(torch.zeros(1, 2, 1024), mailbox)
    with pytest.raises(ValueError, match="contiguous"):
        exchange_parts(torch.zeros(1, 16, 8).transpose(1, 2), mailbox)
    with pytest.raises(ValueError, match=r"columns: a matrix \[64, 32\] asked for, the mailbox takes 4096 bytes"):
        gather_columns(torch.zeros(64, 16), mailbox)
    with pytest.raises(ValueError, match="dtype"):
        exchange_parts(torch.zeros(1, 1, 16, dtype=torch.int32), mailbox)
