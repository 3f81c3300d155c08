"""The proxy: each of its modes does to a connection what it says, and nothing else."""

import asyncio
import time

import pytest
from benchmarks.faults.proxy import PARTITION, Conditions, Direction, Proxy
from tests.polling import until

QUICK_S = 0.5


class Echo:
    """A server that sends back what comes, and knows how each of its connections ended."""

    def __init__(self) -> None:
        self.open = 0
        self.ends: list[str] = []
        self.received = b""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        try:
            while data := await reader.read(1 << 16):
                self.received += data
                if data == b"bye":
                    break
                writer.write(data)
                await writer.drain()
            self.ends.append("closed")
        except ConnectionError:
            self.ends.append("reset")
        finally:
            self.open -= 1
            writer.close()


@pytest.fixture
async def echo():
    return Echo()


@pytest.fixture
async def proxy(echo):
    server = await asyncio.start_server(echo.serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    async with Proxy((host, port), seed=3) as proxy:
        yield proxy
    await until(lambda: not echo.open)
    server.close()


@pytest.fixture
async def dial(proxy):
    """Opens connections through the proxy."""
    writers: list[asyncio.StreamWriter] = []

    async def open_one() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, _, port = proxy.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writers.append(writer)
        return reader, writer

    yield open_one
    for writer in writers:
        writer.close()


async def ask(connection, data: bytes) -> float:
    """Sends and reads the echo; how long that took."""
    reader, writer = connection
    began_s = time.monotonic()
    writer.write(data)
    assert await reader.readexactly(len(data)) == data
    return time.monotonic() - began_s


async def until_quick(connection, data: bytes) -> None:
    """A busy machine makes any answer late, but not all of them."""
    async with asyncio.timeout(60):
        while await ask(connection, data) >= QUICK_S:
            pass


async def silent(reader: asyncio.StreamReader, *, for_s: float = 0.15) -> bool:
    try:
        async with asyncio.timeout(for_s):
            await reader.read(1)
    except TimeoutError:
        return True
    return False


async def test_it_passes_on_both_ways_and_ends(dial, proxy, echo):
    data = bytes(range(256)) * 4096
    connection = await dial()
    reader, writer = connection
    sender = asyncio.create_task(ask(connection, data))
    await sender
    assert proxy.passed_bytes == {Direction.UP: len(data), Direction.DOWN: len(data)}
    assert proxy.connections == 1
    writer.write_eof()
    assert await reader.read() == b""
    assert echo.ends == ["closed"]
    writer.close()
    await until(lambda: proxy.connections == 0)


async def test_delay_is_each_way_and_keeps_the_order(dial, proxy):
    connection = await dial()
    await until_quick(connection, b"quick")
    proxy.conditions = Conditions(delay_s=0.1, jitter_s=0.1)
    assert await ask(connection, b"late") >= 0.2
    numbers = [number.to_bytes(2) for number in range(200)]
    reader, writer = connection
    for number in numbers:
        writer.write(number)
        await asyncio.sleep(0)
    assert await reader.readexactly(400) == b"".join(numbers)
    proxy.conditions = Conditions()
    await until_quick(connection, b"quick again")


async def test_a_partition_holds_everything_and_loses_nothing(dial, proxy, echo):
    connection = await dial()
    reader, writer = connection
    await ask(connection, b"before")
    proxy.conditions = PARTITION
    writer.write(b"meanwhile")
    new_reader, new_writer = await dial()
    new_writer.write(b"new")
    assert await silent(reader)
    assert await silent(new_reader)
    assert echo.received == b"before"
    proxy.conditions = Conditions()
    assert await reader.readexactly(9) == b"meanwhile"
    assert await new_reader.readexactly(3) == b"new"


@pytest.mark.parametrize("direction", list(Direction))
async def test_half_open_drops_one_direction_without_a_word_and_for_good(dial, proxy, echo, direction):
    connection = await dial()
    reader, writer = connection
    await ask(connection, b"before")
    proxy.conditions = Conditions(dropped=frozenset({direction}))
    writer.write(b"lost")
    assert await silent(reader)
    if direction is Direction.DOWN:
        await until(lambda: echo.received == b"beforelost")
    assert echo.received == (b"before" if direction is Direction.UP else b"beforelost")
    proxy.conditions = Conditions()
    # The network is well, new connections are; this one stays what it was.
    await until_quick(await dial(), b"anew")
    writer.write(b"still")
    assert await silent(reader)
    if direction is Direction.UP:
        # No FIN comes through: the server goes on believing in a client that has gone.
        writer.close()
        await asyncio.sleep(0.15)
        assert echo.ends == []
        assert proxy.connections == 2


async def test_reset_ends_every_connection_with_rst_and_takes_new_ones(dial, proxy, echo):
    connections = [await dial() for _ in range(3)]
    for connection in connections:
        await ask(connection, b"before")
    assert proxy.reset() == 3
    for reader, _ in connections:
        with pytest.raises(ConnectionResetError):
            await reader.readexactly(1)
    await until(lambda: echo.ends == ["reset"] * 3)
    await until_quick(await dial(), b"anew")
