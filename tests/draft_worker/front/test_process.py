"""What the front process tells the growth thread of streams whose growth is not read; no gRPC is spoken."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from outrider.draft_worker.front.frames import FrameReader, Kind, pack_frame
from outrider.draft_worker.front.process import Relay

FEW = 17


class Pipe:
    """Keeps the frames that were sent."""

    def __init__(self) -> None:
        self._frames = FrameReader()
        self.sent: list[tuple[Kind, int]] = []

    def write(self, data: bytes) -> None:
        self.sent += [(kind, number) for kind, number, _ in self._frames.feed(data)]


class Reader:
    """A coordinator that reads as many messages as it is let, and says nothing."""

    def __init__(self) -> None:
        self.let = asyncio.Semaphore(0)
        self.read: list[bytes] = []

    def invocation_metadata(self) -> tuple[()]:
        return ()

    async def write(self, message: bytes) -> None:
        await self.let.acquire()
        self.read.append(message)

    async def says(self) -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""


class Streams:
    """Two coordinators' streams of one relay: numbers 1 and 2."""

    def __init__(self) -> None:
        self.relay, self.pipe = Relay(), Pipe()
        self.relay.connection_made(self.pipe)  # type: ignore[arg-type]
        self.readers = Reader(), Reader()
        self.calls: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        for reader in self.readers:
            call: Any = self.relay.speculate(reader.says(), reader)  # type: ignore[arg-type]
            self.calls.append(asyncio.create_task(call))
            await self.settle()

    async def settle(self) -> None:
        """Lets every task go as far as it can."""
        for _ in range(20):
            await asyncio.sleep(0)

    async def grow(self, number: int, messages: int) -> None:
        for place in range(messages):
            self.relay.data_received(pack_frame(Kind.GROWTH, number, bytes([place])))
            await self.settle()

    async def read(self, number: int, messages: int) -> None:
        for _ in range(messages):
            self.readers[number - 1].let.release()
        await self.settle()

    @property
    def told(self) -> list[tuple[Kind, int]]:
        """What the growth thread was told of holds since it was last asked."""
        told = [frame for frame in self.pipe.sent if frame[0] in (Kind.HELD, Kind.RESUMED, Kind.LEFT)]
        self.pipe.sent.clear()
        return told


@pytest.fixture
async def streams() -> AsyncIterator[Streams]:
    opened = Streams()
    await opened.open()
    yield opened
    for call in opened.calls:
        call.cancel()
    await asyncio.gather(*opened.calls, return_exceptions=True)


async def test_a_stream_is_held_while_messages_wait_and_goes_on_when_all_have_left(streams: Streams):
    # One is being written, the others wait: as where all is well.
    await streams.grow(1, FEW)
    assert streams.told == []
    await streams.grow(1, 3)
    assert streams.told == [(Kind.HELD, 1)]
    await streams.read(1, FEW + 2)
    assert streams.told == []
    # The other coordinator reads, and hears nothing of it.
    await streams.read(2, 9)
    await streams.grow(2, 9)
    assert streams.told == []
    await streams.read(1, 1)
    assert streams.told == [(Kind.RESUMED, 1)]
    assert len(streams.readers[0].read) == FEW + 3
    # And the same again.
    await streams.grow(1, FEW + 1)
    assert streams.told == [(Kind.HELD, 1)]


async def test_a_held_stream_that_ends_is_gone_and_says_nothing_more(streams: Streams):
    await streams.grow(1, FEW + 1)
    streams.calls[0].cancel()
    await streams.settle()
    assert streams.told == [(Kind.HELD, 1), (Kind.LEFT, 1)]
    # Growth that was on its way.
    await streams.grow(1, 4)
    assert streams.told == []


async def test_draining_lets_a_held_stream_have_what_waits(streams: Streams):
    await streams.grow(1, FEW + 1)
    streams.relay.end_streams()
    await streams.read(1, FEW + 1)
    assert len(streams.readers[0].read) == FEW + 1
    assert streams.told == [(Kind.HELD, 1), (Kind.LEFT, 2), (Kind.LEFT, 1)]
