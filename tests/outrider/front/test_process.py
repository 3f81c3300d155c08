"""Messages of the front process about streams whose answers are not read; no gRPC is spoken."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from grpc.aio import AbortError

from outrider.front.frames import FrameReader, Kind, pack_frame
from outrider.front.process import Relay

FEW = 4


class Pipe:
    """Keeps the frames that were sent."""

    def __init__(self) -> None:
        self._frames = FrameReader()
        self.sent: list[tuple[Kind, int]] = []
        self.payloads: list[bytes] = []

    def write(self, data: bytes) -> None:
        for kind, number, payload in self._frames.feed(data):
            self.sent.append((kind, number))
            self.payloads.append(payload)


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


class Ended:
    """A caller whose call ends with an error."""

    def invocation_metadata(self) -> tuple[()]:
        return ()

    async def abort_with_status(self, _status: Any) -> None:
        raise AbortError


class Streams:
    """Two coordinators' streams of one relay: numbers 1 and 2."""

    def __init__(self) -> None:
        self.relay, self.pipe = Relay("a.Service", [("Stream", True), ("Unary", False)], most_waiting=FEW - 1), Pipe()
        self.relay.connection_made(self.pipe)  # type: ignore[arg-type]
        self.readers = Reader(), Reader()
        self.calls: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        for reader in self.readers:
            call: Any = self.relay.stream(0, reader.says(), reader)  # type: ignore[arg-type]
            self.calls.append(asyncio.create_task(call))
            await self.settle()

    async def settle(self) -> None:
        """Lets every task go as far as it can."""
        for _ in range(20):
            await asyncio.sleep(0)

    async def answer(self, number: int, messages: int) -> None:
        for place in range(messages):
            self.relay.data_received(pack_frame(Kind.ANSWER, number, bytes([place])))
            await self.settle()

    async def read(self, number: int, messages: int) -> None:
        for _ in range(messages):
            self.readers[number - 1].let.release()
        await self.settle()

    @property
    def told(self) -> list[tuple[Kind, int]]:
        """The holds that the worker was told of since it was last asked."""
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
    await streams.answer(1, FEW)
    assert streams.told == []
    await streams.answer(1, 3)
    assert streams.told == [(Kind.HELD, 1)]
    await streams.read(1, FEW + 2)
    assert streams.told == []
    # The other coordinator reads, and hears nothing of it.
    await streams.read(2, 9)
    await streams.answer(2, 9)
    assert streams.told == []
    await streams.read(1, 1)
    assert streams.told == [(Kind.RESUMED, 1)]
    assert len(streams.readers[0].read) == FEW + 3
    # And the same again.
    await streams.answer(1, FEW + 1)
    assert streams.told == [(Kind.HELD, 1)]


async def test_a_held_stream_that_ends_is_gone_and_says_nothing_more(streams: Streams):
    await streams.answer(1, FEW + 1)
    streams.calls[0].cancel()
    await streams.settle()
    assert streams.told == [(Kind.HELD, 1), (Kind.LEFT, 1)]
    # An answer that was on its way.
    await streams.answer(1, 4)
    assert streams.told == []


async def test_draining_lets_a_held_stream_have_what_waits(streams: Streams):
    await streams.answer(1, FEW + 1)
    streams.relay.end_calls()
    await streams.read(1, FEW + 1)
    assert len(streams.readers[0].read) == FEW + 1
    assert streams.told == [(Kind.HELD, 1), (Kind.LEFT, 2), (Kind.LEFT, 1)]


async def test_a_call_of_one_message_gets_one_answer_or_the_end(streams: Streams):
    def call(message: bytes) -> asyncio.Task[bytes]:
        called: Any = streams.relay.unary(1, message, Ended())  # type: ignore[arg-type]
        return asyncio.create_task(called)

    first, second = call(b"one"), call(b"two")
    await streams.settle()
    assert streams.pipe.sent[-4:] == [(Kind.OPENED, 3), (Kind.MESSAGE, 3), (Kind.OPENED, 4), (Kind.MESSAGE, 4)]
    assert streams.pipe.payloads[-4:] == [b"\x01", b"one", b"\x01", b"two"]
    streams.relay.data_received(pack_frame(Kind.ANSWER, 3, b"1"))
    assert await first == b"1"
    assert streams.told == [(Kind.LEFT, 3)]
    streams.relay.end_calls()
    with pytest.raises(AbortError):
        await second
    assert streams.told[-1] == (Kind.LEFT, 4)


async def test_nobody_is_read_while_the_worker_does_not_read():
    streams, said = Streams(), asyncio.Queue[bytes]()

    async def says() -> AsyncIterator[bytes]:
        while True:
            yield await said.get()

    call: Any = streams.relay.stream(0, says(), Reader())  # type: ignore[arg-type]
    call = asyncio.create_task(call)
    streams.relay.pause_writing()
    for message in (b"a", b"b"):
        said.put_nowait(message)
    await streams.settle()
    assert (streams.pipe.sent, said.qsize()) == ([(Kind.OPENED, 1)], 1)
    streams.relay.resume_writing()
    await streams.settle()
    assert streams.pipe.payloads[1:] == [b"a", b"b"]
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
