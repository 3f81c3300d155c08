"""Records: the host's commands to a pool, eight int32 words each, carried out in order.

A growth record is one node; every other record edits its row. The words behind the first three:

    kind        place drafter   word 3    word 4    word 5        word 6     word 7
    GROWTH      d     bit       id        parent    as_of         token      acceptance (float32 bits)
    OPEN                        length    cached    end           allow
    CLOSE
    PREEMPT
    LIMITS                      end       allow
    SLOTS       n               start     slot      slot          slot       slot
    FORGET      d
    RESENT      d
    COMMIT      n               token     token     token         token      token
    PREFILL                     size      start

OPEN begins a generation; every other record names its generation and is dropped in any other. Effects:

    OPEN        clears the row's entries, trail and `lost`, restarts its id counter. Columns that the host copied before
                (history, stops and so on) stay. `cached` is at most length - 1. State PREFILL, or where only the root
                has no KV (cached = length - 1) RUNNING if length < allow, else HELD; in a drafter's pool, where
                `cached` must be 0, RUNNING or HELD at once.
    CLOSE       state EMPTY, no entries.
    PREEMPT     in a drafter's pool: cached 0, an empty table, HELD with allow = 0. History and pool stay, growth still
                grafts.
    LIMITS      new `end` and `allow`. allow = 0 holds the session; a higher one than its length lets it run again. A
                row in PREFILL stays there.
    SLOTS       table[start .. start + n) takes up to four slots, table_len = start + n; with n = 0 only that.
    FORGET      the ids of place d are void; entries that no other place has proposed go.
    RESENT      the worker at place d begins to send its live tree again: clears `lost`.
    COMMIT      up to five tokens are committed, behind those of earlier records; `graft` collects them for `re_root`.
                OPEN and CLOSE void those of the row that came before.
    PREFILL     in a target's pool: the round computes the KV of the tokens start .. start + size - 1. `graft` passes it
                over; `outrider.kernels.pool.prefill` says when it is used. Its outcome is the row's `cached`, not its
                verdict.

In a drafter's pool the KV slots that OPEN, CLOSE and PREEMPT take from a row are free again: those of its entries, then
those of its committed tokens, table[0 .. cached).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["SLOTS_PER_RECORD", "TOKENS_PER_RECORD", "WORDS", "RecordKind", "Records", "Verdict"]

WORDS = 8
"""int32 words of a record."""
SLOTS_PER_RECORD = 4
TOKENS_PER_RECORD = 5


class RecordKind(enum.IntEnum):
    """Kind of a record."""

    NOTHING = 0
    GROWTH = 1
    OPEN = 2
    CLOSE = 3
    PREEMPT = 4
    LIMITS = 5
    SLOTS = 6
    FORGET = 7
    RESENT = 8
    COMMIT = 9
    PREFILL = 10


class Verdict(enum.IntEnum):
    """Outcome of a record."""

    INVALID = 0
    """Dropped: its row or its place is not there, its kind is none of this pool's, it opens a row with lengths that
    cannot be, or it commits no tokens or more than there is room for.
    """
    OLD_GENERATION = 1
    """It is for an opening of the row that is not in force."""
    EDITED = 2
    """A row edit took effect, or a PREFILL was passed over."""
    APPENDED = 3
    MERGED = 4
    """Another place, or the same one earlier, has proposed the node."""
    ABSORBED = 5
    """The node is a committed token: its id is remembered in the trail."""
    DUPLICATE = 6
    """Dropped: its id is known."""
    UNKNOWN_PARENT = 7
    """Dropped: its parent is not in the pool."""
    STALE = 8
    """Dropped: its parent is unknown, and its drafter was too far behind for the trail to tell."""
    CONTRADICTED = 9
    """Dropped: another token was committed there."""
    FULL = 10
    """Dropped: the row has no room."""


class Records:
    """Build an array of records.

    Ids, generations and slots are int32; what is wrong with growth (a token outside the vocabulary, an acceptance
    outside [0, 1], id 0) is refused where it is parsed, before it comes here.
    """

    def __init__(self) -> None:
        self._rows: list[tuple[int, ...]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def array(self) -> npt.NDArray[np.int32]:
        """All records, [n, 8] int32."""
        return np.array(self._rows, dtype=np.int32).reshape(-1, WORDS)

    def growth(
        self,
        row: int,
        generation: int,
        *,
        place: int,
        node_id: int,
        parent_id: int,
        as_of: int,
        token: int,
        acceptance: float,
        drafter: int = 0,
    ) -> None:
        """Add a node.

        Args:
            row, generation: of the pool.
            place: of the worker that has grown it.
            node_id: that the worker gave it.
            parent_id: its parent's id; 0 is the token at index `as_of` - 1.
            as_of: tokens that were committed when it grew.
            token: its token.
            acceptance: estimated chance that it is accepted, given that its parent is.
            drafter: number of the drafter's kind, 0 to 7.
        """
        # The bits of -0.0 are not those of 0.0.
        words = (node_id, parent_id, as_of, token, int(np.float32(acceptance + 0.0).view(np.int32)))
        self._add(RecordKind.GROWTH, row, generation, *words, place=place, drafter=1 << drafter)

    def open(self, row: int, generation: int, *, length: int, cached: int, end: int, allow: int) -> None:
        """Open the row for a session of `length` tokens, `cached` of which have KV: all but the root at most."""
        self._add(RecordKind.OPEN, row, generation, length, cached, end, allow)

    def close(self, row: int, generation: int) -> None:
        """Close the row."""
        self._add(RecordKind.CLOSE, row, generation)

    def preempt(self, row: int, generation: int) -> None:
        """Take away the KV of a drafter's row."""
        self._add(RecordKind.PREEMPT, row, generation)

    def limits(self, row: int, generation: int, *, end: int, allow: int) -> None:
        """Set how long the session may become, and how far it may go now."""
        self._add(RecordKind.LIMITS, row, generation, end, allow)

    def slots(self, row: int, generation: int, *, start: int, slots: list[int]) -> None:
        """Fill the row's table from index `start` on; as many records as it takes, one if `slots` is empty."""
        for begin in range(0, max(len(slots), 1), SLOTS_PER_RECORD):
            part = slots[begin : begin + SLOTS_PER_RECORD]
            self._add(RecordKind.SLOTS, row, generation, start + begin, *part, place=len(part))

    def forget(self, row: int, generation: int, *, place: int) -> None:
        """Void the ids of a place."""
        self._add(RecordKind.FORGET, row, generation, place=place)

    def resent(self, row: int, generation: int, *, place: int) -> None:
        """Announce that a place sends its live tree again."""
        self._add(RecordKind.RESENT, row, generation, place=place)

    def commit(self, row: int, generation: int, tokens: Sequence[int]) -> None:
        """Commit tokens; as many records as it takes."""
        for begin in range(0, len(tokens), TOKENS_PER_RECORD):
            part = tokens[begin : begin + TOKENS_PER_RECORD]
            self._add(RecordKind.COMMIT, row, generation, *part, place=len(part))

    def prefill(self, row: int, generation: int, *, start: int, size: int) -> None:
        """Compute the KV of `size` tokens from index `start` on."""
        self._add(RecordKind.PREFILL, row, generation, size, start)

    def _add(self, kind: RecordKind, row: int, generation: int, *words: int, place: int = 0, drafter: int = 0) -> None:
        assert 0 <= place < 256 and 0 <= drafter < 256, f"place {place} and drafter bits {drafter} need a byte each"
        padded = (*words, *([0] * (WORDS - 3 - len(words))))
        self._rows.append((kind | place << 8 | drafter << 16, row, _signed(generation), *padded))


def _signed(generation: int) -> int:
    """The int32 with the bits of an unsigned count."""
    return (generation + (1 << 31)) % (1 << 32) - (1 << 31)
