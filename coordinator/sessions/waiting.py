"""Sessions that wait for a place: in turn between clients, and of each client in the order in which they came."""

from collections import Counter
from collections.abc import Iterator

from outrider.coordinator.sessions.session import Session


class WaitingSessions:
    """The queue. All but looking for one that has begun takes constant time.

    Those that have lost their place at a target come before all others. Of the others every client has a line of its
    own, and the lines take turns: a hundred prompts of one client make nobody else's request wait for all of them.

    Attributes:
        tokens: of all prompts that wait.
    """

    def __init__(self) -> None:
        # By session id: those that had a place, the next one last; and of each client, in turn.
        self._replaced: dict[int, Session] = {}
        self._lines: dict[str, dict[int, Session]] = {}
        self._entries = Counter[str]()
        self._count = self.tokens = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Session]:
        yield from reversed(self._replaced.values())
        for line in self._lines.values():
            yield from line.values()

    def __contains__(self, session: Session) -> bool:
        return session.session_id in self._replaced or session.session_id in self._lines.get(session.request.client, ())

    @property
    def entries(self) -> int:
        """Requests that wait, whatever their prompts and choices."""
        return len(self._entries)

    def has_entry(self, entry: str) -> bool:
        """Return True if a session of this request waits."""
        return entry in self._entries

    def append(self, session: Session) -> None:
        """Put a session at the end of its client's line."""
        self._lines.setdefault(session.request.client, {})[session.session_id] = session
        self._note(session, 1)

    def put_first(self, session: Session) -> None:
        """Put a session that has lost its place before all others."""
        self._replaced[session.session_id] = session
        self._note(session, 1)

    def next(self, *, has_begun: bool = False) -> Session | None:
        """Take the next session out, perhaps of those alone whose requests have begun; return None if there is none."""
        if has_begun:
            found = next((session for session in self if session.generation.has_begun), None)
        else:
            found = next(iter(self), None)
        if found is not None:
            client = found.request.client
            is_of_line = self.remove(found)
            if is_of_line and (line := self._lines.pop(client, None)) is not None:
                # Its turn is over.
                self._lines[client] = line
        return found

    def remove(self, session: Session) -> bool:
        """Take a session out, if it waits; return True if it stood in its client's line."""
        client, key = session.request.client, session.session_id
        line = self._lines.get(client, {})
        if self._replaced.pop(key, None) is not None:
            self._note(session, -1)
            return False
        if line.pop(key, None) is None:
            return False
        if not line:
            del self._lines[client]
        self._note(session, -1)
        return True

    def clear(self) -> None:
        """Take all sessions out."""
        self.__init__()

    def _note(self, session: Session, change: int) -> None:
        entry = session.request.entry
        self._entries[entry] += change
        if not self._entries[entry]:
            del self._entries[entry]
        self._count += change
        self.tokens += change * len(session.request.prompt_token_ids)
