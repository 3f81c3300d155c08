"""A TCP relay that holds every byte for a given time: a network between two processes of one machine.

Threads rather than an event loop, whose timers count in whole milliseconds.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from typing import Self

_CHUNK_BYTES = 1 << 16
# Connections beyond one a coordinator are never asked for.
_BACKLOG = 16


class Relay:
    """Listens at one address and passes on what comes to another, both ways.

    Args:
        listen: (host, port) it is reached at; port 0 for a free one.
        upstream: (host, port) it passes on to.

    Attributes:
        address: (host, port) it is reached at.
        rtt_s: round trip that it adds, half of it each way; may be changed at any time.
    """

    def __init__(self, listen: tuple[str, int], upstream: tuple[str, int]) -> None:
        self.rtt_s = 0.0
        self._upstream = upstream
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(listen, backlog=_BACKLOG)
        self.address: tuple[str, int] = self._listener.getsockname()
        threading.Thread(target=self._accept, name="relay", daemon=True).start()

    def close(self) -> None:
        """Ends all connections."""
        # Closing alone wakes no thread that waits in a call on the socket.
        for held in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                held.shutdown(socket.SHUT_RDWR)
            held.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(self._upstream)
                except OSError:
                    near.close()
                    continue
                for held in (near, far):
                    held.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._sockets += [near, far]
                for source, sink in ((near, far), (far, near)):
                    waiting: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
                    threading.Thread(target=self._read, args=(source, waiting), daemon=True).start()
                    threading.Thread(target=_write, args=(sink, waiting), daemon=True).start()

    def _read(self, source: socket.socket, waiting: queue.SimpleQueue[tuple[float, bytes]]) -> None:
        data = b"-"
        while data:
            try:
                data = source.recv(_CHUNK_BYTES)
            except OSError:
                data = b""
            waiting.put((time.monotonic() + self.rtt_s / 2, data))


def _write(sink: socket.socket, waiting: queue.SimpleQueue[tuple[float, bytes]]) -> None:
    with contextlib.suppress(OSError):
        while True:
            due, data = waiting.get()
            if not data:
                sink.shutdown(socket.SHUT_WR)
                return
            time.sleep(max(0.0, due - time.monotonic()))
            sink.sendall(data)
