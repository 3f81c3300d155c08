"""Mailboxes of the ranks that `outrider.kernels.collectives.all_reduce` sums over: one a rank, all laid out alike.

counts [LETTERS + COLUMNS, W, PROGRAMS] int64 | inbox 0 | inbox 1 | small inbox 0 | small inbox 1 |
rows' inbox 0 | rows' inbox 1 | gathered columns
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outrider.kernels.argument_checks import check_dtype
from outrider.kernels.backend import check_shape

__all__ = ["COUNT_KINDS", "PROGRAMS", "SMALL_MOST", "Inbox", "Mailbox", "MailboxLayout"]

# Programs of a launch: each waits for its twin on the other ranks, so all must be at work at once.
PROGRAMS = 128
# Of counts: letters, columns.
COUNT_KINDS = 2
# Numbers of a small letter.
SMALL_MOST = 65536


@dataclass(frozen=True, kw_only=True)
class MailboxLayout:
    """Sizes and offsets of the parts of every rank's mailbox, in bytes.

    Attributes:
        world_size: W.
        letter_bytes: of the largest letter, a multiple of 128.
        gathered_bytes: of the largest gathered matrix.
        row_size: numbers of a row that is summed and normed in one launch.
        row_counts: most such rows.
    """

    world_size: int
    letter_bytes: int
    gathered_bytes: int
    row_size: int = 0
    row_counts: int = 0

    @property
    def counts_bytes(self) -> int:
        """Bytes of the counts."""
        return COUNT_KINDS * self.world_size * PROGRAMS * 8

    @property
    def inbox_bytes(self) -> int:
        """Bytes of one inbox."""
        return self.world_size * self.letter_bytes

    @property
    def small_inbox_bytes(self) -> int:
        """Bytes of one inbox of small letters: a word of eight bytes a number."""
        return self.world_size * SMALL_MOST * 8

    @property
    def total_bytes(self) -> int:
        """Bytes of a mailbox."""
        return self.gathered_start + self.gathered_bytes

    def inbox_start(self, turn: int) -> int:
        """First byte of an inbox."""
        return self.counts_bytes + turn * self.inbox_bytes

    def small_inbox_start(self, turn: int) -> int:
        """First byte of an inbox of small letters."""
        return self.inbox_start(2) + turn * self.small_inbox_bytes

    @property
    def rows_inbox_bytes(self) -> int:
        """Bytes of one inbox of rows: a word of eight bytes for every two numbers."""
        return self.world_size * self.row_counts * self.row_size // 2 * 8

    def rows_inbox_start(self, turn: int) -> int:
        """First byte of an inbox of rows."""
        return self.small_inbox_start(2) + turn * self.rows_inbox_bytes

    @property
    def gathered_start(self) -> int:
        """First byte of the gathered columns."""
        return -(-self.rows_inbox_start(2) // 128) * 128


@dataclass(frozen=True, kw_only=True, eq=False)
class Inbox:
    """Inbox of one call's letters.

    Attributes:
        letters: [W count] as they are read.
        words: [W count] int64, as small letters arrive; None for large ones.
        addresses: [W] int64, of every rank's words, or letters where there are none.
    """

    letters: torch.Tensor
    words: torch.Tensor | None
    addresses: torch.Tensor


class Mailbox:
    """One rank's mailbox, and how it reaches the others'.

    Args:
        layout: the same on all ranks.
        rank: whose this is.
        memory: [total_bytes] uint8 on this rank's device, zeros, mapped by the other ranks.
        addresses: of every rank's memory as this rank's device sees it.
        owner: kept as long as the mailbox: what the others' memory is mapped by.

    Attributes:
        counts: [kinds, W, PROGRAMS] int64, flat: what the other ranks' programs said last.
        calls: [kinds + 1, PROGRAMS] int64, of this rank's programs; those of small letters last.
        row_calls: [rows] int64, of this rank's programs that sum and norm a row.
        count_addresses, gathered_addresses: [W] int64, where these lie at every rank.
        small_most: numbers of the largest letter that counts as small.
        stopped: [1] int32; once it is not 0, nothing waits any more and what comes out is void.
    """

    def __init__(
        self, layout: MailboxLayout, *, rank: int, memory: torch.Tensor, addresses: Sequence[int], owner: object = None
    ) -> None:
        check_shape("memory", memory, (layout.total_bytes,))
        check_dtype("memory", memory, (torch.uint8,))
        if len(addresses) != layout.world_size:
            raise ValueError(f"addresses: {len(addresses)} given, {layout.world_size} needed")
        self.layout, self.rank, self.memory = layout, rank, memory
        starts = (
            0,
            layout.inbox_start(0),
            layout.inbox_start(1),
            layout.small_inbox_start(0),
            layout.small_inbox_start(1),
            layout.gathered_start,
            layout.rows_inbox_start(0),
            layout.rows_inbox_start(1),
        )
        table = [[address + start for address in addresses] for start in starts]
        rows = torch.tensor(table, dtype=torch.int64, device=memory.device).unbind(0)
        self.count_addresses, self.gathered_addresses = rows[0], rows[5]
        self._inbox_addresses, self._small_addresses, self._row_addresses = rows[1:3], rows[3:5], rows[6:8]
        self.counts = memory[: layout.counts_bytes].view(torch.int64)
        self.calls = torch.zeros(COUNT_KINDS + 1, PROGRAMS, dtype=torch.int64, device=memory.device)
        self.row_calls = torch.zeros(max(layout.row_counts, 1), dtype=torch.int64, device=memory.device)
        self.stopped = torch.zeros(1, dtype=torch.int32, device=memory.device)
        self.small_most = SMALL_MOST
        self._turn = self._rows_turn = 0
        self._owner = owner

    @property
    def world_size(self) -> int:
        """W."""
        return self.layout.world_size

    def next_inbox(self, count: int, dtype: torch.dtype) -> Inbox:
        """The inbox whose turn it is, for letters of so many numbers."""
        turn, self._turn = self._turn, 1 - self._turn
        start = self.layout.inbox_start(turn)
        letters = self.memory[start : start + self.world_size * count * dtype.itemsize].view(dtype)
        if count > self.small_most:
            return Inbox(letters=letters, words=None, addresses=self._inbox_addresses[turn])
        start = self.layout.small_inbox_start(turn)
        words = self.memory[start : start + self.world_size * count * 8].view(torch.int64)
        return Inbox(letters=letters, words=words, addresses=self._small_addresses[turn])

    def next_rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The inbox of rows whose turn it is, [W rows N / 2] int64, and where it lies at every rank, [W] int64."""
        turn, self._rows_turn = self._rows_turn, 1 - self._rows_turn
        start = self.layout.rows_inbox_start(turn)
        words = self.memory[start : start + self.layout.rows_inbox_bytes].view(torch.int64)
        return words, self._row_addresses[turn]

    def takes_rows(self, rows: int, size: int) -> bool:
        """Return True if this many rows of this size can be summed and normed in one launch."""
        return rows <= self.layout.row_counts and size == self.layout.row_size

    def takes_letter(self, count: int, dtype: torch.dtype) -> bool:
        """Return True if a letter of this many numbers fits."""
        return count * dtype.itemsize <= self.layout.letter_bytes

    def takes_columns(self, rows: int, columns: int, dtype: torch.dtype) -> bool:
        """Return True if a matrix of all ranks' columns fits."""
        return rows * columns * dtype.itemsize <= self.layout.gathered_bytes
