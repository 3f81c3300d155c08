"""Ports for servers whose addresses have to be known before they listen."""

import random
import socket

import pytest

from outrider.roles import ports


def test_all_of_a_row_have_to_be_free(monkeypatch: pytest.MonkeyPatch):
    drawn = iter([100, 99, 101])
    monkeypatch.setattr(random, "choice", lambda _: next(drawn))
    monkeypatch.setattr(ports, "_is_free", lambda host, port: port != 100)
    assert ports.free_port(count=2) == 101


def test_a_port_that_somebody_listens_on_is_not_free():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert not ports._is_free("127.0.0.1", taken.getsockname()[1])


def test_where_none_is_free_it_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ports, "_is_free", lambda host, port: False)
    with pytest.raises(OSError, match=r"127\.0\.0\.1: no 2 free ports in a row"):
        ports.free_port(count=2)
