"""As in test_all_reduce.py, the ranks stand in one process: a first round sends and waits for nothing."""

from __future__ import annotations

import pytest
import torch

from outrider.kernels.collectives.all_reduce_norm import exchange_norm, exchange_norm_reference
from outrider.kernels.collectives.mailbox import Mailbox, MailboxLayout


def _mailboxes(device: torch.device, world_size: int, size: int) -> list[Mailbox]:
    layout = MailboxLayout(world_size=world_size, letter_bytes=0, gathered_bytes=0, row_size=size, row_counts=4)
    memories = [torch.zeros(layout.total_bytes, dtype=torch.uint8, device=device) for _ in range(world_size)]
    addresses = [memory.data_ptr() for memory in memories]
    return [Mailbox(layout, rank=rank, memory=memory, addresses=addresses) for rank, memory in enumerate(memories)]


@pytest.mark.parametrize(("parts", "norms_addend"), [(1, False), (2, True)])
def test_every_rank_sums_and_norms_alike(triton_device: torch.device, parts: int, *, norms_addend: bool) -> None:
    mailboxes = _mailboxes(triton_device, 3, 96)
    weight, addend_weight = torch.rand(2, 96, device=triton_device) + 0.5
    if not norms_addend:
        addend_weight = None
    for rows in (3, 1, 4):
        dtype = torch.float16 if parts == 1 else torch.float32
        held = [torch.randn(parts, rows, 96, device=triton_device).to(dtype) for _ in mailboxes]
        before = torch.randn(rows, 96, device=triton_device).to(torch.float16)
        wanted_hidden = before.clone()
        wanted = exchange_norm_reference(wanted_hidden, held, weight, eps=1e-5, addend_weight=addend_weight)
        found: list[tuple[torch.Tensor, torch.Tensor]] = []
        for sends_only in (True, False):
            calls = [mailbox.row_calls.clone() for mailbox in mailboxes]
            found = []
            for mailbox, rank_held in zip(mailboxes, held, strict=True):
                mailbox.stopped.fill_(int(sends_only))
                hidden = before.clone()
                normed = exchange_norm(hidden, rank_held, weight, mailbox, eps=1e-5, addend_weight=addend_weight)
                found.append((hidden, normed))
            if sends_only:
                for mailbox, rank_calls in zip(mailboxes, calls, strict=True):
                    mailbox.row_calls.copy_(rank_calls)
                    mailbox._rows_turn = 1 - mailbox._rows_turn
        for hidden, normed in found:
            torch.testing.assert_close(hidden, wanted_hidden, rtol=2e-3, atol=2e-3)
            torch.testing.assert_close(normed, wanted, rtol=4e-3, atol=4e-3)
            assert torch.equal(hidden, found[0][0])
            assert torch.equal(normed, found[0][1])


def test_what_does_not_fit_is_named() -> None:
    mailbox = _mailboxes(torch.device("cpu"), 2, 96)[0]
    weight = torch.ones(96)
    with pytest.raises(ValueError, match=r"hidden: \[5, 96\] given, the mailbox takes 4 rows of 96"):
        exchange_norm(torch.zeros(5, 96, dtype=torch.float16), torch.zeros(1, 5, 96), weight, mailbox, eps=1e-5)
    with pytest.raises(ValueError, match=r"hidden: dtype torch\.float32"):
        exchange_norm(torch.zeros(4, 96), torch.zeros(1, 4, 96), weight, mailbox, eps=1e-5)
