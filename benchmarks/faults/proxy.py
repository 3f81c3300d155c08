"""A TCP proxy that can do to a connection what a network does: delay, stall, cut, throttle, or swallow it in silence.

    client -> near | reader -> queue -> writer | far -> server          and the same the other way

What TCP hides of a lossy network is the loss itself: what is left to see are bytes that come later (`stall_chance`) and
connections that are reset (`reset`). A partition that heals loses nothing either, since both ends send again: bytes are
held until it is over (`held`). A peer that is gone without a word, or a router that has forgotten the connection, is
different: bytes vanish, no FIN comes, and that connection stays dead when the network is well again (`dropped`).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Self

_CHUNK_BYTES = 1 << 16
# Chunks that wait in a direction before its sender is made to wait, as by a full window.
_WAITING_CHUNKS = 64


class Direction(Enum):
    """Direction of bytes: towards the server, or back."""

    UP = "up"
    DOWN = "down"


BOTH = frozenset(Direction)
# When it is to come out, and what: b"" is the FIN, None that there will be none.
_Waiting = tuple[float, bytes | None]


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """Conditions of a link; the default changes nothing.

    Attributes:
        delay_s: every byte takes longer, each way.
        jitter_s: and up to so much more, evenly drawn; the order is kept.
        stall_chance: of a chunk, to be taken for lost and sent again `stall_s` later.
        stall_s: see there.
        bytes_per_s: of a connection, each way; None is no bound.
        held: directions in which nothing comes through for now; new connections wait as well.
        dropped: directions in which bytes vanish, on connections that try it for good.
    """

    delay_s: float = 0.0
    jitter_s: float = 0.0
    stall_chance: float = 0.0
    stall_s: float = 0.2
    bytes_per_s: float | None = None
    held: frozenset[Direction] = frozenset()
    dropped: frozenset[Direction] = frozenset()


PARTITION = Conditions(held=BOTH)


class Proxy:
    """Listens at one address and passes on to another; use with `async with`.

    Args:
        upstream: (host, port) that it passes on to.
        listen: (host, port) it is reached at; port 0 takes a free one.
        seed: of jitter and stalls.

    Attributes:
        passed_bytes: by direction, since the start.
    """

    def __init__(self, upstream: tuple[str, int], *, listen: tuple[str, int] = ("127.0.0.1", 0), seed: int = 0) -> None:
        self.passed_bytes = dict.fromkeys(Direction, 0)
        self.upstream = upstream
        self.random = random.Random(seed)
        self._listen = listen
        self._conditions = Conditions()
        self._changed = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._connections: dict[_Connection, asyncio.Task[None]] = {}

    @property
    def address(self) -> str:
        """host:port it listens at."""
        assert self._server is not None
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"{host}:{port}"

    @property
    def connections(self) -> int:
        """Open now."""
        return len(self._connections)

    @property
    def conditions(self) -> Conditions:
        """Conditions of the link; a change applies to bytes under way, too."""
        return self._conditions

    @conditions.setter
    def conditions(self, conditions: Conditions) -> None:
        self._conditions = conditions
        self._changed.set()
        self._changed = asyncio.Event()

    def reset(self) -> int:
        """Reset all connections; return how many there were."""
        connections = list(self._connections)
        for connection in connections:
            connection.reset()
        return len(connections)

    async def until(self, condition: Callable[[Conditions], bool]) -> None:
        """Wait for conditions such as these."""
        while not condition(self._conditions):
            await self._changed.wait()

    async def start(self) -> None:
        """Begin to listen."""
        self._server = await asyncio.start_server(self._accept, *self._listen)

    async def close(self) -> None:
        """Reset all connections and listen no more."""
        if self._server is not None:
            self._server.close()
        for task in self._connections.values():
            task.cancel()
        await asyncio.gather(*self._connections.values(), return_exceptions=True)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _Connection(self, _End(reader, writer))
        task = self._connections[connection] = asyncio.create_task(connection.run())
        task.add_done_callback(lambda _: self._connections.pop(connection, None))


@dataclass(frozen=True)
class _End:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def prepare(self) -> None:
        held: socket.socket = self.writer.get_extra_info("socket")
        held.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def reset(self) -> None:
        # Without lingering, a close says RST and not FIN.
        with contextlib.suppress(OSError):
            held: socket.socket = self.writer.get_extra_info("socket")
            held.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


@dataclass(eq=False)
class _Connection:
    """One connection through the proxy: two directions, each with a task that reads and one that writes."""

    proxy: Proxy
    near: _End
    far: _End | None = None
    dead: set[Direction] = field(default_factory=set)
    """Directions whose bytes vanish for good."""

    def reset(self) -> None:
        for end in filter(None, (self.near, self.far)):
            end.reset()

    async def run(self) -> None:
        try:
            await self.proxy.until(lambda conditions: not conditions.held)
            far = self.far = _End(*await asyncio.open_connection(*self.proxy.upstream))
            self.near.prepare()
            far.prepare()
            async with asyncio.TaskGroup() as tasks:
                for direction, source, sink in (
                    (Direction.UP, self.near, far),
                    (Direction.DOWN, far, self.near),
                ):
                    waiting: asyncio.Queue[_Waiting] = asyncio.Queue(_WAITING_CHUNKS)
                    tasks.create_task(self._read(direction, source, waiting))
                    tasks.create_task(self._write(direction, sink, waiting))
        except (OSError, ExceptionGroup):
            # Nobody listens behind it, or an end is gone: the other one hears of it, unless nothing reaches it.
            pass
        except asyncio.CancelledError:
            self.reset()
            raise
        try:
            await self._outlive()
        finally:
            self.reset()

    async def _outlive(self) -> None:
        """Whom nothing reaches goes on believing in the other end until it gives the connection up itself."""
        for direction, end in ((Direction.UP, self.far), (Direction.DOWN, self.near)):
            with contextlib.suppress(OSError):
                while end is not None and direction in self.dead and await end.reader.read(_CHUNK_BYTES):
                    pass

    async def _read(self, direction: Direction, source: _End, waiting: asyncio.Queue[_Waiting]) -> None:
        now, due_s = asyncio.get_running_loop().time, 0.0
        while True:
            try:
                data = await source.reader.read(_CHUNK_BYTES)
            except ConnectionError:
                data = b""
            conditions = self.proxy.conditions
            if direction in conditions.dropped:
                self.dead.add(direction)
            if direction in self.dead:
                if not data:
                    await waiting.put((due_s, None))
                    return
                continue
            late_s = conditions.delay_s + self.proxy.random.uniform(0, conditions.jitter_s)
            if self.proxy.random.random() < conditions.stall_chance:
                late_s += conditions.stall_s
            due_s = max(due_s, now() + late_s)
            await waiting.put((due_s, data))
            if not data:
                return

    async def _write(self, direction: Direction, sink: _End, waiting: asyncio.Queue[_Waiting]) -> None:
        now, proxy = asyncio.get_running_loop().time, self.proxy
        while True:
            due_s, data = await waiting.get()
            await asyncio.sleep(max(0.0, due_s - now()))
            await proxy.until(lambda conditions: direction not in conditions.held)
            if data is None:
                return
            if not data:
                if sink.writer.can_write_eof():
                    sink.writer.write_eof()
                return
            if proxy.conditions.bytes_per_s is not None:
                await asyncio.sleep(len(data) / proxy.conditions.bytes_per_s)
            if direction in self.dead:
                continue
            sink.writer.write(data)
            await sink.writer.drain()
            proxy.passed_bytes[direction] += len(data)
