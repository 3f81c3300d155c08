"""The inbox of a worker's thread, filled by a socket and by threads."""

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from outrider.front.inbox import Inbox


@pytest.fixture
def inbox() -> Iterator[tuple[Inbox[int], socket.socket]]:
    ours, theirs = socket.socketpair()
    # Numbers, in the place of commands.
    found = Inbox[int](ours, list)
    with ours, theirs, contextlib.closing(found):
        yield found, theirs


def test_the_inbox_is_filled_by_the_socket_and_by_threads(inbox: tuple[Inbox[int], socket.socket]):
    found, theirs = inbox
    assert found.take() == []
    theirs.send(b"\1\2")
    assert found.take(None) == [1, 2]
    # The byte that has woken it once does not wake it again.
    for number in range(2):
        waker = threading.Timer(0.05, found.put, [[number]])
        waker.start()
        assert found.take(None) == [number]
        waker.join()
    assert found.take(0.001) == []
    found.put()
    assert found.take(None) == []


def test_the_inbox_goes_on_without_its_socket(inbox: tuple[Inbox[int], socket.socket]):
    found, theirs = inbox
    theirs.close()
    assert found.take(None) == []
    waker = threading.Timer(0.05, found.put, [[7]])
    waker.start()
    assert found.take(None) == [7]
    waker.join()


def test_what_threads_put_wakes_whoever_has_not_looked_for_long():
    with contextlib.closing(Inbox[int]()) as found:
        # More than the socket that wakes has room for.
        for number in range(100_000):
            found.put([number])
        assert found.take(None) == [*range(100_000)]
