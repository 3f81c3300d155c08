"""The growth thread's inbox, filled by a socket and by threads."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from queue import Empty
from typing import Any

import pytest

from outrider.draft_worker.front.inbox import SocketInbox


def bytes_of(data: bytes) -> Any:
    """Numbers, in the place of commands."""
    return [*data]


@pytest.fixture
def inbox() -> Iterator[tuple[SocketInbox, socket.socket]]:
    ours, theirs = socket.socketpair()
    found = SocketInbox(ours, bytes_of)
    with ours, theirs, contextlib.closing(found):
        yield found, theirs


def test_the_inbox_is_filled_by_the_socket_and_by_threads(inbox: tuple[SocketInbox, socket.socket]):
    found, theirs = inbox
    with pytest.raises(Empty):
        found.get_nowait()
    theirs.send(b"\1\2")
    assert found.get() == [1, 2]
    # The byte that has woken it once does not wake it again.
    for _ in range(2):
        waker = threading.Timer(0.05, found.put, [None])
        waker.start()
        assert found.get() is None
        waker.join()


def test_the_inbox_goes_on_without_its_socket(inbox: tuple[SocketInbox, socket.socket]):
    found, theirs = inbox
    theirs.close()
    with pytest.raises(Empty):
        found.get()
    waker = threading.Timer(0.05, found.put, [[]])
    waker.start()
    assert found.get() == []
    waker.join()
