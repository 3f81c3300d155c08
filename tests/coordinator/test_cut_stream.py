"""A stream that is cut without a word: packets are lost both ways, nobody closes the connection."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from tests.coordinator.fake_workers import FakeTarget
from tests.coordinator.round_servicer import RoundServicer
from tests.coordinator.running import service_running
from tests.polling import until

from outrider.coordinator.sessions.messages import RoundResults
from outrider.coordinator.workers.links import TargetLink
from outrider.sampling import SamplingSpec
from outrider.v1 import common_pb2, target_pb2_grpc
from outrider.wire import uints_to_bytes


class Wire:
    """Connections to a port, by way of one of their own, until they are cut."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._is_cut = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []

    async def listen(self) -> str:
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def cut(self) -> None:
        """From now on nothing arrives, and nothing is closed."""
        self._is_cut.set()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for writer in self._writers:
            writer.close()
        self._server.close()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers += [writer, far_writer]
        for ends in ((reader, far_writer), (far_reader, writer)):
            task = asyncio.create_task(self._pass_on(*ends))
            self._tasks.add(task)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            if self._is_cut.is_set():
                continue
            writer.write(data)
            await writer.drain()
        if not self._is_cut.is_set():
            writer.close()


@pytest.fixture
async def servicer() -> AsyncIterator[RoundServicer]:
    servicer = RoundServicer(lambda: FakeTarget(step_s=0.001))
    yield servicer


@pytest.fixture
async def port(servicer: RoundServicer) -> AsyncIterator[int]:
    add = target_pb2_grpc.add_TargetServiceServicer_to_server
    async with service_running(add, servicer) as address:
        yield int(address.rpartition(":")[2])


async def test_a_target_whose_results_do_not_arrive_any_more_is_lost(port, servicer):
    """Its lease may go on: heartbeats travel another way. Both ends notice by themselves."""
    wire = Wire(port)
    lost, results = asyncio.get_running_loop().create_future(), list[RoundResults]()
    link = TargetLink(
        await wire.listen(), incarnation=1, vocab_size=50, on_results=results.append, on_lost=lost.set_result
    )
    sampling = SamplingSpec(max_new_tokens=1 << 20).to_proto()
    link.open_session(common_pb2.SessionOpen(session_id=1, epoch=1, prompt=uints_to_bytes([1, 2]), sampling=sampling))
    try:
        async with asyncio.timeout(60):
            await until(lambda: results)
            wire.cut()
            reason = await lost
            await until(lambda: not servicer.open_streams)
        assert reason.startswith("UNAVAILABLE")
    finally:
        await link.close()
        await wire.close()
