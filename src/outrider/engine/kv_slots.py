"""Token-granular KV slots on the host: one table row a session.

The caches themselves live in the model runner; this is bookkeeping alone. Accepting a branch of a tree moves slot
numbers within a row and never moves keys or values.

A slot is free, or a row's own, or a lender's (`outrider.engine.prefix_cache`). A row begins with what it has borrowed,
which it only reads, and goes on with its own. What a lender has and no row borrows counts as free: it is taken back
when it is needed.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from outrider.errors import OutOfSlots

if TYPE_CHECKING:
    from outrider.engine.prefix_cache import PrefixCache

Slots = npt.NDArray[np.int32]


class SlotTable:
    """Rows of slot numbers over one pool of slots.

    Args:
        max_rows: sessions at a time.
        max_row_len: most slots of one row.
    """

    def __init__(self, *, num_slots: int, max_rows: int, max_row_len: int) -> None:
        assert min(num_slots, max_rows, max_row_len) >= 1
        self.max_row_len = max_row_len
        self.table: Slots = np.full((max_rows, max_row_len), -1, dtype=np.int32)
        """[max_rows, max_row_len] slot numbers; -1 at and past a row's length."""
        # A stack whose top hands out ascending numbers: consecutive slots are read without a gather.
        self._free = np.arange(num_slots - 1, -1, -1, dtype=np.int32)
        self._free_count = num_slots
        self.lender: PrefixCache | None = None
        """Lender of slots to rows; at most one, which sets this itself."""
        self._lengths = [0] * max_rows
        self._borrowed = [0] * max_rows

    @property
    def num_slots(self) -> int:
        """Slots of the pool."""
        return len(self._free)

    @property
    def free(self) -> int:
        """Slots that no row holds, those that a lender remembers included."""
        return self._free_count + self.remembered

    @property
    def used(self) -> int:
        """Slots that rows hold, one that several rows share counted once."""
        return len(self._free) - self.free

    @property
    def remembered(self) -> int:
        """Slots that no row holds, with KV that a lender remembers."""
        return 0 if self.lender is None else self.lender.unused

    def length(self, row: int) -> int:
        """Slots of the row."""
        return self._lengths[row]

    def borrowed(self, row: int) -> int:
        """Return how many of the row's slots, its first ones, are borrowed."""
        return self._borrowed[row]

    def extend(self, row: int, count: int) -> None:
        """Append `count` fresh slots to the row.

        Raises:
            OutOfSlots: the pool or the row has no room; nothing has changed.
        """
        length = self._lengths[row]
        if count > self.free:
            raise OutOfSlots(f"{count} slots asked for, {self.free} of {self.num_slots} free")
        if length + count > self.max_row_len:
            raise OutOfSlots(f"a row of {length + count} slots asked for, at most {self.max_row_len} fit")
        if count > self._free_count and self.lender is not None:
            self._put_back(self.lender.give_back(count - self._free_count))
        rest = self._free_count - count
        self.table[row, length : length + count] = self._free[rest : self._free_count][::-1]
        self._free_count = rest
        self._lengths[row] = length + count

    def truncate(self, row: int, length: int) -> None:
        """Free the row's slots at indices >= `length`; borrowed ones return to their lender."""
        end, borrowed = self._lengths[row], self._borrowed[row]
        if length >= end:
            return
        if length < borrowed:
            assert self.lender is not None
            self._borrowed[row] = length
            self.lender.take_return(row, length)
        self._put_back(self.table[row, max(length, borrowed) : end])
        self.table[row, length:end] = -1
        self._lengths[row] = length

    def borrow(self, row: int, slots: Slots) -> None:
        """Put a lender's slots behind those that the row has borrowed already, in place of its own at these indices.

        Args:
            slots: [n] with the KV of the n tokens that follow what is borrowed; n reaches the row's end, or less.
        """
        start = self._borrowed[row]
        stop = start + len(slots)
        end = self._lengths[row]
        assert stop <= self.max_row_len, "more is lent than a row holds"
        self._put_back(self.table[row, start : min(stop, end)])
        self.table[row, start:stop] = slots
        self._borrowed[row] = stop
        self._lengths[row] = max(stop, end)

    def lend(self, row: int, length: int) -> Slots:
        """Pass the row's own slots before `length` to the lender, from which it then borrows them; return a copy."""
        slots = self.table[row, self._borrowed[row] : length].copy()
        self._borrowed[row] = length
        return slots

    def reclaim(self) -> None:
        """Take back the lender's slots that no row borrows; their tokens are forgotten."""
        if self.lender is not None:
            self._put_back(self.lender.give_back(self.lender.unused))

    def reorder(self, row: int, start: int, count: int, kept: Sequence[int]) -> None:
        """Move some of the row's slots to the front of a part of it; the others follow in order.

        Args:
            start: index of the first slot of the part.
            count: slots of the part.
            kept: distinct offsets; the slot at `start + kept[i]` moves to `start + i`.
        """
        assert start >= self._borrowed[row], "borrowed slots are not the row's to move"
        if all(place == offset for place, offset in enumerate(kept)):
            return
        part = self.table[row, start : start + count]
        is_other = np.ones(count, dtype=np.bool_)
        is_other[list(kept)] = False
        part[:] = np.concatenate((part[list(kept)], part[is_other]))

    def _put_back(self, slots: Slots) -> None:
        count = len(slots)
        self._free[self._free_count : self._free_count + count] = slots[::-1]
        self._free_count += count
