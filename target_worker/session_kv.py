"""The KV of sessions: rows of the slot table, and the prefix cache under them where there is one.

A session with a step in flight is left alone: its row has slots that the step still writes.
"""

from collections.abc import Iterable

import numpy as np

from outrider.engine.kv_slots import SlotTable
from outrider.engine.prefix_cache import PrefixCache, TokenIds, common_length
from outrider.target_worker.sessions import Session


class SessionKv:
    """What sessions hold of one slot table.

    Args:
        slots: the table.
        remembers: whether KV outlives its session, in a prefix cache.
        looks_ahead: whether what lies in a slot depends on the token after its own, too: a draft head's KV does.
    """

    def __init__(self, slots: SlotTable, *, remembers: bool, looks_ahead: bool = False) -> None:
        self.slots = slots
        self._looks_ahead = looks_ahead
        self._cache = PrefixCache(slots) if remembers else None

    @property
    def remembers(self) -> bool:
        """Whether what one session computes is found by others."""
        return self._cache is not None

    def length(self, session: Session) -> int:
        """Tokens of the session with KV."""
        return self.slots.length(session.row)

    def pending(self, session: Session) -> int:
        """Tokens before the root that have no KV yet."""
        return session.pending(self.slots)

    def take(self, session: Session) -> None:
        """Gives the session the KV that is known of its tokens before the root."""
        if self._cache is None or session.seen_version == self._cache.version or self.pending(session) <= 0:
            return
        assert not session.in_flight
        session.seen_version = self._cache.version
        had = max(self.length(session), session.reached)
        length = self._cache.take(session.row, self._keys(session, session.root_index))
        # What the session had computed itself, and lost, is no gift.
        session.cached_tokens += max(0, min(length, session.prompt_len) - had)
        session.note_reached(length)

    def keep(self, session: Session) -> None:
        """Remembers the KV of the session's tokens, for itself and for others."""
        assert not session.in_flight
        if self._cache is not None:
            self._cache.keep(session.row, self._keys(session, self.length(session)))

    def cut(self, session: Session, length: int) -> None:
        """The row keeps the KV of the first `length` tokens; the rest is remembered."""
        self.keep(session)
        self.slots.truncate(session.row, length)
        session.seen_version = None

    def release(self, session: Session) -> None:
        """Gives up the row."""
        self.keep(session)
        self.slots.release_row(session.row)

    def common_length(self, one: Session, other: Session) -> int:
        """How many slots of one session would do for the other."""
        return common_length(*(self._keys(session, session.root_index) for session in (one, other)))

    def _keys(self, session: Session, count: int) -> TokenIds:
        """[count] what the session's first slots depend on, beside those before them: a token, or it and the next."""
        ids = session.token_ids()
        if not self._looks_ahead:
            return ids[:count]
        wide = ids.astype(np.int64)
        return wide[:count] | wide[1 : count + 1] << 32

    def forget(self) -> None:
        """Remembers nothing any more of what no session holds."""
        self.slots.reclaim()

    def freed_by(self, sessions: Iterable[Session]) -> int:
        """How many slots would become free if all of these were cut to nothing."""
        rows = [session.row for session in sessions]
        if self._cache is not None:
            return self._cache.freed_by(rows)
        return sum(self.slots.length(row) for row in rows)
