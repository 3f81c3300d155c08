"""Lists of addresses that change."""

import asyncio
import os
import socket
from pathlib import Path

import pytest

from outrider import addresses
from outrider.addresses import check_address, resolver


@pytest.mark.parametrize("entry", ["", "host", ":80", "host:http", "file:", "dns:host", "dns::80"])
def test_what_cannot_be_meant_is_refused_with_what_would_do(entry: str) -> None:
    with pytest.raises(ValueError, match="needed"):
        check_address(entry)
    with pytest.raises(ValueError, match="needed"):
        resolver(["a:1", entry])


async def test_entries_are_joined_and_each_address_is_there_once(tmp_path: Path) -> None:
    path = tmp_path / "list"
    path.write_text("b:2\n\n  c:3  # the third\na:1\n")
    assert await resolver(["a:1", f"file:{path}", "d:4"])() == ["a:1", "b:2", "c:3", "d:4"]


async def test_an_entry_that_cannot_be_told_holds_and_keeps_nobody_from_the_others(tmp_path: Path) -> None:
    path = tmp_path / "list"
    resolve = resolver([f"file:{path}", "d:4"])
    assert await resolve() == ["d:4"]
    path.write_text("a:1\n")
    assert await resolve() == ["a:1", "d:4"]
    path.unlink()
    assert await resolve() == ["a:1", "d:4"]


async def test_a_file_is_read_again_when_it_has_changed(tmp_path: Path) -> None:
    path = tmp_path / "list"
    resolve = resolver([f"file:{path}"])
    with pytest.raises(OSError, match="list"):
        await resolve()
    path.write_text("a:1\n")
    assert await resolve() == ["a:1"]
    path.write_text("a:1\nb:")
    with pytest.raises(OSError, match="'b:' found"):
        await resolve()
    path.write_text("b:2\n")
    os.utime(path, ns=(1, 1))
    assert await resolve() == ["b:2"]


async def test_a_name_has_several_addresses_and_is_asked_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    known = ["10.0.0.2", "10.0.0.1", "fd00::1"]
    asked = []

    async def getaddrinfo(host: str, port: int, **options: object) -> list[object]:
        asked.append((host, port))
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in known]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    resolve = resolver(["dns:coordinators.internal:50052"])
    assert await resolve() == ["10.0.0.1:50052", "10.0.0.2:50052", "[fd00::1]:50052"]
    known.pop()
    assert len(await resolve()) == 3
    monkeypatch.setattr(addresses, "_DNS_PAUSE_S", 0.0)
    assert len(await resolve()) == 2
    assert asked == [("coordinators.internal", 50052)] * 2
