"""The ranks stand in one process here, one after the other: a first round sends and waits for nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from outrider.kernels.collectives.all_reduce import (
    Mailbox,
    MailboxLayout,
    exchange_parts,
    exchange_parts_reference,
    gather_columns,
    gather_columns_reference,
)
from outrider.kernels.collectives.all_reduce_norm import exchange_norm, exchange_norm_reference


def _mailboxes(
    device: torch.device, world_size: int, *, small: bool = True, letter_bytes: int = 1 << 12, **rows: int
) -> list[Mailbox]:
    layout = MailboxLayout(world_size=world_size, letter_bytes=letter_bytes, gathered_bytes=letter_bytes, **rows)
    memories = [torch.zeros(layout.total_bytes, dtype=torch.uint8, device=device) for _ in range(world_size)]
    addresses = [memory.data_ptr() for memory in memories]
    mailboxes = [Mailbox(layout, rank=rank, memory=memory, addresses=addresses) for rank, memory in enumerate(memories)]
    for mailbox in mailboxes:
        mailbox.small_most = mailbox.small_most if small else 0
    return mailboxes


def _all_ranks(
    operator: Callable[[torch.Tensor, Mailbox], Any], held: Sequence[torch.Tensor], mailboxes: list[Mailbox]
) -> list[Any]:
    """Return every rank's result: once all have sent, each is taken back to before its call, and waits in earnest."""
    for sends_only in (True, False):
        before = [
            (mailbox.calls.clone(), mailbox._turn, mailbox.row_calls.clone(), mailbox._rows_turn)
            for mailbox in mailboxes
        ]
        received = []
        for mailbox, rank_held in zip(mailboxes, held, strict=True):
            mailbox.stopped.fill_(int(sends_only))
            received.append(operator(rank_held, mailbox))
        if sends_only:
            for mailbox, (calls, turn, row_calls, rows_turn) in zip(mailboxes, before, strict=True):
                mailbox.calls.copy_(calls)
                mailbox.row_calls.copy_(row_calls)
                mailbox._turn, mailbox._rows_turn = turn, rows_turn
    return received


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize(("parts", "dtype"), [(1, torch.bfloat16), (3, torch.float32)])
def test_every_rank_gets_every_letter(
    triton_device: torch.device, parts: int, dtype: torch.dtype, *, small: bool
) -> None:
    mailboxes = _mailboxes(triton_device, 3, small=small)
    for rows in (3, 1):
        held = [torch.randn(parts, rows, 208, device=triton_device).to(dtype) for _ in mailboxes]
        for received in _all_ranks(exchange_parts, held, mailboxes):
            torch.testing.assert_close(received, exchange_parts_reference(held), rtol=0, atol=0)


@pytest.mark.parametrize("small", [True, False])
def test_two_letters_in_a_row_do_not_meet(triton_device: torch.device, *, small: bool) -> None:
    mailboxes = _mailboxes(triton_device, 2, small=small)
    first, second = (torch.full((1, 2, 16), value, device=triton_device) for value in (1.0, 2.0))
    held = _all_ranks(exchange_parts, [first, first], mailboxes)[0]
    _all_ranks(exchange_parts, [second, second], mailboxes)
    assert (held == 1).all()


def test_letters_may_be_rounded(triton_device: torch.device) -> None:
    mailboxes = _mailboxes(triton_device, 2, small=False)
    held = [torch.randn(2, 1, 48, device=triton_device) for _ in mailboxes]
    received = _all_ranks(lambda parts, mailbox: exchange_parts(parts, mailbox, torch.bfloat16), held, mailboxes)
    assert torch.equal(*received)
    # The interpreter cuts where a GPU rounds.
    torch.testing.assert_close(received[0], exchange_parts_reference(held, torch.bfloat16), rtol=2**-7, atol=0)


def test_columns_come_together_at_rank_0(triton_device: torch.device) -> None:
    mailboxes = _mailboxes(triton_device, 2)
    for _ in range(2):
        held = [torch.randn(5, 48, device=triton_device) for _ in mailboxes]
        gathered = _all_ranks(gather_columns, held, mailboxes)[0]
        torch.testing.assert_close(gathered, gather_columns_reference(held), rtol=0, atol=0)


@pytest.mark.parametrize("small", [True, False])
def test_who_was_stopped_does_not_wait(triton_device: torch.device, *, small: bool) -> None:
    mailboxes = _mailboxes(triton_device, 2, small=small)
    mailboxes[0].stopped.fill_(1)
    exchange_parts(torch.ones(1, 1, 16, device=triton_device), mailboxes[0])
    if triton_device.type == "cuda":
        torch.cuda.synchronize()


@pytest.mark.parametrize(("parts", "norms_addend"), [(1, False), (2, True)])
def test_every_rank_sums_and_norms_alike(triton_device: torch.device, parts: int, *, norms_addend: bool) -> None:
    mailboxes = _mailboxes(triton_device, 3, letter_bytes=0, row_size=96, row_counts=4)
    weight, addend_weight = torch.rand(2, 96, device=triton_device) + 0.5
    options: dict[str, Any] = {"eps": 1e-5, "addend_weight": addend_weight if norms_addend else None}
    for rows in (3, 1, 4):
        dtype = torch.float16 if parts == 1 else torch.float32
        held = [torch.randn(parts, rows, 96, device=triton_device).to(dtype) for _ in mailboxes]
        before = torch.randn(rows, 96, device=triton_device).to(torch.float16)
        wanted_hidden = before.clone()
        wanted = exchange_norm_reference(wanted_hidden, held, weight, **options)

        def norm(rank_held: torch.Tensor, mailbox: Mailbox, before: torch.Tensor = before) -> list[torch.Tensor]:
            hidden = before.clone()
            return [hidden, exchange_norm(hidden, rank_held, weight, mailbox, **options)]

        found = _all_ranks(norm, held, mailboxes)
        for hidden, normed in found:
            torch.testing.assert_close(hidden, wanted_hidden, rtol=2e-3, atol=2e-3)
            torch.testing.assert_close(normed, wanted, rtol=4e-3, atol=4e-3)
            assert torch.equal(hidden, found[0][0]) and torch.equal(normed, found[0][1])


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
    mailbox, weight = _mailboxes(torch.device("cpu"), 2, letter_bytes=0, row_size=96, row_counts=4)[0], torch.ones(96)
    with pytest.raises(ValueError, match=r"hidden: \[5, 96\] given, the mailbox takes 4 rows of 96"):
        exchange_norm(torch.zeros(5, 96, dtype=torch.float16), torch.zeros(1, 5, 96), weight, mailbox, eps=1e-5)
    with pytest.raises(ValueError, match=r"hidden: dtype torch\.float32"):
        exchange_norm(torch.zeros(4, 96), torch.zeros(1, 4, 96), weight, mailbox, eps=1e-5)
