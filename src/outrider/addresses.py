"""Lists of coordinator addresses that may change while a role runs (torch-free).

host:port        one address
file:PATH        one address a line (# begins a comment), read again whenever the file has changed
dns:NAME:PORT    every address that the name has, asked again every few seconds
"""

import asyncio
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

logger = logging.getLogger(__name__)

Resolve = Callable[[], Awaitable[Sequence[str]]]
"""Gives the list as it is now: host:port each. Raises OSError where it cannot be told, and then the last one holds."""

_DNS_PAUSE_S = 5.0
_RESOLVE_PAUSE_S = 1.0
_RESOLVE_TIMEOUT_S = 5.0

Member = TypeVar("Member")
Leave = Callable[[Member], Coroutine[Any, Any, None]]


def check_address(entry: str) -> None:
    """Raise ValueError where an entry of a list cannot be meant, with what would do."""
    kind, _, rest = entry.partition(":")
    if kind == "file":
        if not rest:
            raise ValueError(f"{entry!r} given, file:PATH needed")
        return
    host, _, port = (rest if kind == "dns" else entry).rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"{entry!r} given, host:port, file:PATH or dns:NAME:PORT needed")


def check_coordinators(entries: Sequence[str]) -> None:
    """Raise ValueError where an entry of a worker's option `coordinators` cannot be meant, with what would do."""
    for entry in entries:
        try:
            check_address(entry)
        except ValueError as error:
            raise ValueError(f"coordinators: {error}") from error


def resolver(entries: Sequence[str]) -> Resolve:
    """Return a function that resolves all entries in order, without repeats; it raises if none can be resolved.

    Raises:
        ValueError: an entry that cannot be meant.
    """
    for entry in entries:
        check_address(entry)
    sources = {entry: _source(entry) for entry in entries}
    known: dict[str, Sequence[str]] = {}
    troubles: dict[str, OSError] = {}

    async def resolve() -> Sequence[str]:
        for entry, source in sources.items():
            try:
                known[entry] = await source()
                troubles.pop(entry, None)
            except OSError as error:
                # A name that is gone for a while keeps nobody from those whose addresses are known.
                if str(error) != str(troubles.get(entry)):
                    logger.warning("%s cannot be told, what it last was holds: %s", entry, error)
                troubles[entry] = error
        if sources and len(troubles) == len(sources):
            raise next(iter(troubles.values()))
        return list(dict.fromkeys(address for entry in sources for address in known.get(entry, ())))

    return resolve


def _source(entry: str) -> Resolve:
    kind, _, rest = entry.partition(":")
    if kind == "file":
        return _FileList(Path(rest))
    if kind == "dns":
        return _Name(rest)

    async def fixed() -> Sequence[str]:
        return [entry]

    return fixed


class _FileList:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int, int] | None = None
        self._addresses: Sequence[str] = ()

    async def __call__(self) -> Sequence[str]:
        status = self._path.stat()
        seen = status.st_mtime_ns, status.st_size, status.st_ino
        if seen != self._seen:
            lines = [line.partition("#")[0].strip() for line in self._path.read_text("utf-8").splitlines()]
            addresses = [line for line in lines if line]
            for address in addresses:
                if not address.rpartition(":")[2].isdigit():
                    # Half a file perhaps: whoever writes it is not done.
                    raise OSError(f"{self._path}: {address!r} found, host:port needed")
            self._addresses, self._seen = addresses, seen
        return self._addresses


class _Name:
    def __init__(self, endpoint: str) -> None:
        self._host, _, self._port = endpoint.rpartition(":")
        self._addresses: Sequence[str] = ()
        self._asked_s = -_DNS_PAUSE_S

    async def __call__(self) -> Sequence[str]:
        now_s = time.monotonic()
        if now_s - self._asked_s >= _DNS_PAUSE_S:
            loop = asyncio.get_running_loop()
            found = await loop.getaddrinfo(self._host, int(self._port), type=socket.SOCK_STREAM)
            hosts = sorted({str(sockaddr[0]) for *_, sockaddr in found})
            self._addresses = [f"[{host}]:{self._port}" if ":" in host else f"{host}:{self._port}" for host in hosts]
            self._asked_s = now_s
        return self._addresses


class AddressFollower(Generic[Member]):
    """Keeps one member for each address of a list that is resolved every second.

    Args:
        join: makes the member of a new address. While it raises it is tried again, and nobody else joins or leaves.
        leave: ends a member; called in a task of its own where the address has gone from the list.

    Attributes:
        members: by address.
    """

    def __init__(self, resolve: Resolve, *, join: Callable[[str], Member], leave: Leave[Member]) -> None:
        self._resolve, self._join, self._leave = resolve, join, leave
        self.members: dict[str, Member] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._following: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to follow the list."""
        self._following = asyncio.create_task(self._follow(), name="list of coordinators")

    async def close(self, leave: Leave[Member] | None = None) -> None:
        """Follow the list no further; end all members, as `leave` does if it is given, and wait for their end."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
        members = list(self.members.values())
        self.members.clear()
        await asyncio.gather(*map(leave or self._leave, members), *self._leaving)

    async def _follow(self) -> None:
        trouble = ""
        while True:
            before = trouble
            try:
                async with asyncio.timeout(_RESOLVE_TIMEOUT_S):
                    wanted, trouble = await self._resolve(), ""
                for address in wanted:
                    if address not in self.members:
                        self.members[address] = self._join(address)
            except Exception as error:  # noqa: BLE001 - whatever an injected resolver raises, the members stay
                wanted, trouble = list(self.members), f"{type(error).__name__}: {error}"
                if trouble != before:
                    logger.warning("the list of coordinators cannot be followed, the last one holds: %s", trouble)
            for address in self.members.keys() - set(wanted):
                logger.info("%s is no coordinator of the list any more", address)
                left = asyncio.create_task(self._leave(self.members.pop(address)))
                self._leaving.add(left)
                left.add_done_callback(self._leaving.discard)
            await asyncio.sleep(_RESOLVE_PAUSE_S)
