"""One reader of a session's events: as many lines as it may be behind, and an honest gap where it fell further back.

    push ──> [ line | line | ... at most so many ] ──> read
                 full: what comes is counted, not kept
                 read empty: a gap with the count, then the whole tree, and on from there

The session never waits for a reader, and a reader that falls behind holds no more than this.
"""

import asyncio
import json
from collections import deque
from collections.abc import Callable

MAX_LINES = 2048


class Watcher:
    """The lines of one session for one reader.

    Args:
        snapshot: the whole tree as it is now, as a line: from there a reader that has missed something goes on.
        release: called once when the reader goes.
    """

    def __init__(
        self, snapshot: Callable[[], str], release: Callable[["Watcher"], None], *, max_lines: int = MAX_LINES
    ) -> None:
        self._snapshot, self._release, self._max_lines = snapshot, release, max_lines
        self._lines: deque[str] = deque()
        self._lost = 0
        self._wake = asyncio.Event()
        self.is_ended = False
        """True once the session has ended: no line comes after those that wait."""

    def push(self, line: str) -> None:
        """Queue a line, or count it as lost."""
        if self._lost and not self._lines:
            # The tree as it is now holds what this line says.
            self._note_gap(1)
            self._lines.append(self._snapshot())
        elif self._lost or len(self._lines) >= self._max_lines:
            self._lost += 1
        else:
            self._lines.append(line)
        self._wake.set()

    def end(self, line: str) -> None:
        """Queue the last line, which is never lost."""
        if self._lost:
            self._note_gap(0)
            self._lines.append(self._snapshot())
        self._lines.append(line)
        self.is_ended = True
        self._wake.set()

    def _note_gap(self, more: int) -> None:
        self._lines.append(json.dumps({"e": "gap", "lost": self._lost + more}))
        self._lost = 0

    def take(self) -> list[str]:
        """Return the waiting lines, and empty the queue."""
        lines = list(self._lines)
        self._lines.clear()
        return lines

    async def read(self, *, timeout_s: float) -> list[str]:
        """Return the waiting lines, or wait `timeout_s` for the first; empty after that and at the end."""
        if not self._lines and not self.is_ended:
            self._wake.clear()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._wake.wait()
            except TimeoutError:
                pass
        return self.take()

    def close(self) -> None:
        """Release the reader; harmless when it has gone."""
        self._lines.clear()
        self._release(self)
