"""Commands to the thread that owns a worker's model, read from the front process's socket by that thread itself."""

import contextlib
import select
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

CommandT = TypeVar("CommandT")

_READ_BYTES = 1 << 20


class Inbox(Generic[CommandT]):
    """A queue that one thread reads, filled from a socket and by other threads of this process.

    What the socket brings is looked at when its reader asks, so that nobody else takes the interpreter from it.

    Args:
        data: the socket; its other end closes with the process there. None where only threads fill it.
        read: makes commands of bytes that have come, perhaps none.
    """

    def __init__(
        self, data: socket.socket | None = None, read: Callable[[bytes], Sequence[CommandT]] | None = None
    ) -> None:
        self._data, self._read = data, read
        self._given: deque[CommandT] = deque()
        self._alarm, self._wake = socket.socketpair()
        for end in (self._alarm, self._wake):
            end.setblocking(False)
        self._watched = [self._alarm] if data is None else [data, self._alarm]

    def put(self, commands: Sequence[CommandT] = ()) -> None:
        """Add commands, and wake the reader even if there are none; any thread may call this."""
        self._given.extend(commands)
        try:
            self._wake.send(b"\0")
        except OSError:
            # Full: nobody has looked for long, and will at the first of those that are there. Closed: nobody will.
            return

    def take(self, timeout_s: float | None = 0.0) -> list[CommandT]:
        """Return the commands that have come, perhaps none.

        Args:
            timeout_s: how long to wait for anything to come, if nothing is there; None is for ever.
        """
        if timeout_s != 0.0 and not self._given:
            select.select(self._watched, (), (), timeout_s)
        # The alarm first: whoever puts something from here on sounds it again.
        with contextlib.suppress(BlockingIOError):
            self._alarm.recv(_READ_BYTES)
        taken = self._read_socket()
        while self._given:
            taken.append(self._given.popleft())
        return taken

    def close(self) -> None:
        """Free its sockets, once its reader has ended, or hangs."""
        self._alarm.close()
        self._wake.close()

    def _read_socket(self) -> list[CommandT]:
        if self._data is None or self._read is None:
            return []
        try:
            data = self._data.recv(_READ_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if data:
            return list(self._read(data))
        # The front process has ended, and this one is about to.
        self._data, self._watched = None, [self._alarm]
        return []
