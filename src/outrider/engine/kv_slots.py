"""Which KV slot holds which token: token-granular slots, one table row a session, on the host.

The caches themselves live in the model runner; this is bookkeeping alone. Accepting a branch of a tree moves slot
numbers within a row and never moves keys or values.

A slot is free, or a row's own, or a lender's (`outrider.engine.prefix_cache`). A row begins with what it has borrowed,
which it only reads, and goes on with its own. What a lender has and no row borrows counts as free: it is taken back
when it is needed.
"""

import operator
from array import array
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from outrider.compiled import IS_COMPILED
from outrider.engine import slot_kernels
from outrider.errors import OutOfSlots

Slots = npt.NDArray[np.int32]


class SlotLender(Protocol):
    """Who keeps slots beside the rows, and lends them to any number of rows."""

    @property
    def unused(self) -> int:
        """Its slots that no row borrows."""
        ...

    def give_back(self, count: int) -> Slots:
        """Parts with `count` of its unused slots."""
        ...

    def take_return(self, row: int, length: int) -> None:
        """The row keeps only the first `length` of what it has borrowed."""
        ...


class SlotTable:
    """Rows of slot numbers over one pool of slots.

    Args:
        num_slots: slots of the pool.
        max_rows: sessions at a time.
        max_row_len: most slots of one row.

    Raises:
        ValueError: a size below 1.
    """

    def __init__(self, *, num_slots: int, max_rows: int, max_row_len: int) -> None:
        for name, value in (("num_slots", num_slots), ("max_rows", max_rows), ("max_row_len", max_row_len)):
            if value < 1:
                raise ValueError(f"{name}: {value} given, at least 1 needed")
        self.max_row_len = max_row_len
        self.table: Slots = np.full((max_rows, max_row_len), -1, dtype=np.int32)
        """[max_rows, max_row_len] slot numbers; -1 at and past a row's length."""
        # A stack whose top hands out ascending numbers: consecutive slots are read without a gather.
        self._free = np.arange(num_slots - 1, -1, -1, dtype=np.int32)
        self._free_count = num_slots
        self.lender: SlotLender | None = None
        """Who lends slots to rows; at most one, who sets it."""
        self.lengths = [0] * max_rows
        """[max_rows] slots of each row; to be read only."""
        self._borrowed = [0] * max_rows
        self._changed_from = [0] * max_rows
        self._free_rows = list(range(max_rows - 1, -1, -1))

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

    @property
    def free_rows(self) -> int:
        """Rows that can be acquired."""
        return len(self._free_rows)

    def length(self, row: int) -> int:
        """Slots of the row."""
        return self.lengths[row]

    def borrowed(self, row: int) -> int:
        """How many of the row's slots, its first ones, are a lender's."""
        return self._borrowed[row]

    def take_changes(self, rows: Sequence[int]) -> tuple[list[int], list[int]]:
        """Where the slots of each row that may differ from those at the last call begin, and where they end.

        For whoever keeps a copy of the table, and for nobody else.

        Args:
            rows: [n] distinct rows.

        Returns:
            [n] the first index in question, the row's length where none is, and [n] the rows' lengths.
        """
        lengths, changed_from = self.lengths, self._changed_from
        begins: list[int] = []
        ends: list[int] = []
        for row in rows:
            begin, end = changed_from[row], lengths[row]
            begins.append(begin if begin < end else end)
            ends.append(end)
            changed_from[row] = end
        return begins, ends

    def acquire_row(self) -> int:
        """An empty row.

        Raises:
            OutOfSlots: every row is taken.
        """
        if not self._free_rows:
            raise OutOfSlots(f"all {len(self.lengths)} rows are taken: raise max_num_seqs")
        return self._free_rows.pop()

    def release_row(self, row: int) -> None:
        """Frees the row and its slots."""
        assert row not in self._free_rows, f"row {row} released twice"
        self.truncate(row, 0)
        self._free_rows.append(row)

    def extend(self, row: int, count: int) -> None:
        """Appends `count` fresh slots to the row.

        Raises:
            OutOfSlots: the pool or the row has no room; nothing has changed.
        """
        length = self.lengths[row]
        if count > self.free:
            raise OutOfSlots(f"{count} slots asked for, {self.free} of {self.num_slots} free")
        if length + count > self.max_row_len:
            raise OutOfSlots(f"a row of {length + count} slots asked for, at most {self.max_row_len} fit")
        if count > self._free_count and self.lender is not None:
            self._put_back(self.lender.give_back(count - self._free_count))
        rest = self._free_count - count
        self.table[row, length : length + count] = self._free[rest : self._free_count][::-1]
        self._free_count = rest
        self.lengths[row] = length + count

    def extend_rows(self, rows: Sequence[int], lengths: Sequence[int], counts: Sequence[int]) -> bool:
        """Appends fresh slots to several rows; whether there was room for all, without which nothing has changed.

        Args:
            rows: [n] distinct rows.
            lengths: [n] theirs.
            counts: [n] of fresh slots.
        """
        total = sum(counts)
        ends = list(map(operator.add, lengths, counts))
        if total > self.free or max(ends) > self.max_row_len:
            return False
        if len(rows) == 1:
            self.extend(rows[0], total)
            return True
        if total > self._free_count and self.lender is not None:
            self._put_back(self.lender.give_back(total - self._free_count))
        if IS_COMPILED:
            columns = np.frombuffer(array("q", [*rows, *lengths, *counts]), dtype=np.int64).reshape(3, -1)
            self._free_count = slot_kernels.take_slots(self.table, self._free, self._free_count, columns)
        else:
            rest = self._free_count - total
            self.table[_entries(rows, lengths, counts, total)] = self._free[rest : self._free_count][::-1]
            self._free_count = rest
        for row, end in zip(rows, ends, strict=True):
            self.lengths[row] = end
        return True

    def truncate(self, row: int, length: int) -> None:
        """Frees the row's slots at indices >= `length`; borrowed ones return to their lender."""
        end, borrowed = self.lengths[row], self._borrowed[row]
        if length >= end:
            return
        if length < borrowed:
            assert self.lender is not None
            self._borrowed[row] = length
            self.lender.take_return(row, length)
        self._put_back(self.table[row, max(length, borrowed) : end])
        self.table[row, length:end] = -1
        self.lengths[row] = length
        self._changed_from[row] = min(self._changed_from[row], length)

    def borrow(self, row: int, slots: Slots) -> None:
        """Puts a lender's slots behind those that the row has borrowed already, in place of its own at these indices.

        Args:
            row: the row.
            slots: [n] with the KV of the n tokens that follow what is borrowed; n reaches the row's end, or less.
        """
        start = self._borrowed[row]
        stop = start + len(slots)
        end = self.lengths[row]
        assert stop <= self.max_row_len, "more is lent than a row holds"
        self._put_back(self.table[row, start : min(stop, end)])
        self.table[row, start:stop] = slots
        self._borrowed[row] = stop
        self.lengths[row] = max(stop, end)
        self._changed_from[row] = min(self._changed_from[row], start)

    def lend(self, row: int, length: int) -> Slots:
        """Makes the row's own slots before `length` the lender's, from whom the row has them now; a copy of them."""
        slots = self.table[row, self._borrowed[row] : length].copy()
        self._borrowed[row] = length
        return slots

    def reclaim(self) -> None:
        """Takes back what a lender has and no row borrows: none of it is remembered any more."""
        if self.lender is not None:
            self._put_back(self.lender.give_back(self.lender.unused))

    def retain(self, row: int, start: int, kept: Sequence[int]) -> None:
        """Keeps some of the row's slots from `start` on, in a new order, and frees the rest.

        Args:
            row: the row.
            start: index of the first slot in question.
            kept: distinct offsets; the slot at `start + kept[i]` moves to `start + i`.
        """
        end = self.lengths[row]
        assert start >= self._borrowed[row], "borrowed slots are not the row's to give away"
        if all(place == offset for place, offset in enumerate(kept)):
            # Nothing moves: a root without accepted nodes, or a chain.
            self.truncate(row, start + len(kept))
            return
        self._changed_from[row] = min(self._changed_from[row], start)
        tail = self.table[row, start:end].copy()
        chosen = np.asarray(kept, dtype=np.int64)
        dropped = np.ones(len(tail), dtype=np.bool_)
        dropped[chosen] = False
        assert len(tail) - int(dropped.sum()) == len(chosen), f"offsets kept twice: {list(kept)}"
        self._put_back(tail[dropped])
        self.table[row, start : start + len(chosen)] = tail[chosen]
        self.table[row, start + len(chosen) : end] = -1
        self.lengths[row] = start + len(chosen)

    def reorder(self, row: int, start: int, count: int, kept: Sequence[int]) -> None:
        """Moves some of the row's slots to the front of a part of it; the others follow in order.

        Args:
            row: the row.
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
        self._changed_from[row] = min(self._changed_from[row], start)

    def retain_rows(
        self,
        rows: Sequence[int],
        starts: Sequence[int],
        counts: Sequence[int],
        *,
        kept: Sequence[int],
        sizes: Sequence[int],
    ) -> None:
        """`retain` of several rows at once.

        Args:
            rows: [n] distinct rows.
            starts: [n] indices of the first slots in question, none of them borrowed.
            counts: [n] slots from there to each row's end.
            kept: [sum of sizes] of each row the offsets from its `start` that are kept, ascending.
            sizes: [n] of each row's, at least 1.
        """
        retain = self._retain_compiled if IS_COMPILED else self._retain_columns
        for row, start, size, has_moved in zip(
            rows, starts, sizes, retain(rows, starts, counts, kept, sizes), strict=True
        ):
            self.lengths[row] = start + size
            begin = start if has_moved else start + size
            self._changed_from[row] = min(self._changed_from[row], begin)

    def _retain_compiled(
        self,
        rows: Sequence[int],
        starts: Sequence[int],
        counts: Sequence[int],
        kept: Sequence[int],
        sizes: Sequence[int],
    ) -> list[int]:
        """`_retain_columns` as one loop."""
        columns = np.frombuffer(array("q", [*rows, *starts, *counts, *sizes, *sizes]), dtype=np.int64).reshape(5, -1)
        offsets = np.frombuffer(array("q", kept), dtype=np.int64)
        count = slot_kernels.retain_slots(self.table, self._free, self._free_count, columns, offsets)
        assert count >= 0, f"offsets kept twice, or in another order: {list(kept)}"
        self._free_count = count
        return columns[4].tolist()

    def _retain_columns(
        self,
        rows: Sequence[int],
        starts: Sequence[int],
        counts: Sequence[int],
        kept: Sequence[int],
        sizes: Sequence[int],
    ) -> list[bool]:
        """The same but for `lengths`: [n] whether any slot of the row moved."""
        total = sum(counts)
        entries = _entries(rows, starts, counts, total)
        tail = self.table[entries]
        ends, places = np.array((sizes, counts)).cumsum(axis=1), np.array(kept)
        lasts = places[ends[0] - 1]
        places += (ends[1] - counts).repeat(sizes)
        dropped = np.ones(total, dtype=np.bool_)
        dropped[places] = False
        assert total - int(dropped.sum()) == len(places), f"offsets kept twice: {list(kept)}"
        self._put_back(tail[dropped])
        self.table[entries] = -1
        self.table[_entries(rows, starts, sizes, len(places))] = tail[places]
        # Where the last one has not moved, none has.
        return (lasts >= sizes).tolist()

    def _put_back(self, slots: Slots) -> None:
        count = len(slots)
        self._free[self._free_count : self._free_count + count] = slots[::-1]
        self._free_count += count


def _entries(
    rows: Sequence[int], begins: Sequence[int], counts: Sequence[int], total: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """[total] rows and columns of the table: of each row so many from its begin on."""
    firsts = np.array([rows, begins])
    if total == len(rows):
        return firsts[0], firsts[1]
    of_each = np.array(counts)
    firsts[1] -= of_each.cumsum() - of_each
    of_row = firsts.repeat(of_each, axis=1)
    return of_row[0], of_row[1] + np.arange(total)
