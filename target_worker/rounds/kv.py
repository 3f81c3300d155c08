"""The KV slots of sessions: a row of the slot table each, which the device's table mirrors.

A row holds the slots of the tokens with KV, and behind them some that the next rounds may fill. What other sessions
have computed is borrowed from the prefix cache. Rounds under way write to a row's slots: what is free again is free
only once the device has reported that the row is closed.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from outrider.engine.kv_slots import SlotTable
from outrider.engine.prefix_cache import PrefixCache


class RowKv:
    """Slots of the sessions' rows in one slot table.

    Args:
        slots: the table; its rows are those of the pool.
        remembers: whether KV outlives its session, in a prefix cache.

    Attributes:
        slots: as given.
    """

    def __init__(self, slots: SlotTable, *, remembers: bool) -> None:
        self.slots = slots
        self._cache = PrefixCache(slots) if remembers else None

    @property
    def remembers(self) -> bool:
        """True if others find what one session computes."""
        return self._cache is not None

    def begin(self, row: int, tokens: npt.NDArray[np.int32]) -> int:
        """Give an empty row the known KV of the longest beginning of `tokens`, [n] int32; return its length."""
        return 0 if self._cache is None else self._cache.take(row, tokens)

    def extend(self, row: int, length: int) -> bool:
        """Let the row have this many slots, if there are as many; return whether it has."""
        missing = length - self.slots.length(row)
        if missing > self.slots.free or length > self.slots.max_row_len:
            return False
        if missing > 0:
            self.slots.extend(row, missing)
        return True

    def share(self, row: int, tokens: npt.NDArray[np.int32]) -> None:
        """Let others find the KV of `tokens`, [n] int32, the row's first ones; rounds may be using it."""
        if self._cache is not None:
            self._cache.share(row, tokens)

    def end(self, row: int, tokens: npt.NDArray[np.int32]) -> None:
        """Take all slots from a row that no round uses; the KV of its first tokens, `tokens` [n] int32, is kept."""
        self.slots.truncate(row, len(tokens))
        if self._cache is not None:
            self._cache.keep(row, tokens)
        self.slots.truncate(row, 0)

    def freed_by(self, rows: Iterable[int]) -> int:
        """Return how many slots would become free if all these rows ended."""
        if self._cache is not None:
            return self._cache.freed_by(rows)
        return sum(self.slots.length(row) for row in rows)
