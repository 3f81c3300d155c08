"""The growth thread's commands, read from the front process's socket by that thread itself."""

import select
import socket
from collections import deque
from collections.abc import Callable, Sequence
from queue import Empty

from outrider.draft_worker.rounds.commands import Command

_READ_BYTES = 1 << 20


class SocketInbox:
    """A queue as the growth thread uses one: filled from a socket, and by other threads of this process.

    Read by one thread. What the socket brings is looked at when that thread asks, so that nobody else takes the
    interpreter from it.

    Args:
        data: the socket; its other end closes with the process there.
        commands: makes commands of what has been read, perhaps none.
    """

    def __init__(self, data: socket.socket, commands: Callable[[bytes], Sequence[Command]]) -> None:
        self._data, self._commands = data, commands
        self._waiting: deque[Sequence[Command] | None] = deque()
        self._alarm, self._wake = socket.socketpair()
        for end in (self._alarm, self._wake):
            end.setblocking(False)
        self._watched = [data, self._alarm]

    def put(self, commands: Sequence[Command] | None) -> None:
        """Adds to the queue; any thread may call this."""
        self._waiting.append(commands)
        try:
            self._wake.send(b"\0")
        except BlockingIOError:
            # Nobody has looked for long, and will at the first of those that are there.
            return

    def get(self) -> Sequence[Command] | None:
        """The next entry, waited for.

        Raises:
            Empty: what has come is no whole entry.
        """
        if self._waiting:
            return self._waiting.popleft()
        ready, _, _ = select.select(self._watched, (), ())
        if self._alarm in ready:
            self._alarm.recv(_READ_BYTES)
        return self.get_nowait()

    def get_nowait(self) -> Sequence[Command] | None:
        """The next entry.

        Raises:
            Empty: there is none.
        """
        if not self._waiting:
            self._read()
        if not self._waiting:
            raise Empty
        return self._waiting.popleft()

    def qsize(self) -> int:
        """Entries that have been read; any thread may call this."""
        return len(self._waiting)

    def close(self) -> None:
        """Called when its reader has ended, or hangs."""
        self._alarm.close()
        self._wake.close()

    def _read(self) -> None:
        if len(self._watched) == 1:
            return
        try:
            data = self._data.recv(_READ_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            # The front process has ended, and this one is about to.
            self._watched = [self._alarm]
            return
        commands = self._commands(data)
        if commands:
            self._waiting.append(commands)
