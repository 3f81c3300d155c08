"""Registration against a registry of our own in the same process."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import grpc
import grpc.aio
import pytest

from outrider import rpc
from outrider.errors import WorkerRefused
from outrider.v1 import common_pb2, registry_pb2, registry_pb2_grpc
from outrider.worker import introduce, keep_registered, keep_registered_everywhere

SERVICE = "outrider.v1.RegistryService"


@dataclass
class FakeRegistry(registry_pb2_grpc.RegistryServiceServicer):
    """Gives leases of 10 ms heartbeats, unless it refuses; notes what it hears."""

    refusal: str = ""
    end_after: int = 1 << 30
    refused: int = 0
    introductions: list[registry_pb2.WorkerIntroduction] = field(default_factory=list)
    loads: list[common_pb2.WorkerLoad] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def Register(  # noqa: N802
        self, request_iterator: AsyncIterator[registry_pb2.WorkerReport], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[registry_pb2.Lease]:
        heard = 0
        async for report in request_iterator:
            if self.refusal:
                self.refused += 1
                self.changed.set()
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, self.refusal)
            if report.WhichOneof("report") == "introduction":
                self.introductions.append(report.introduction)
                yield registry_pb2.Lease(incarnation=1, heartbeat_interval_ms=10, lease_ms=1000)
            else:
                self.loads.append(report.load)
            self.changed.set()
            heard += 1
            if heard > self.end_after:
                return

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    async def serve(self, address: str = "127.0.0.1:0") -> rpc.RoleServer:
        server = rpc.RoleServer(
            services=[SERVICE],
            add_services=lambda server: registry_pb2_grpc.add_RegistryServiceServicer_to_server(self, server),
            address=address,
        )
        await server.start()
        return server


def introduction() -> registry_pb2.WorkerIntroduction:
    return introduce(
        registry_pb2.WORKER_ROLE_TARGET,
        address="127.0.0.1:1",
        model=common_pb2.ModelInfo(name="tiny", vocab_size=61),
        limits=registry_pb2.WorkerLimits(max_sessions=2),
    )


def load() -> common_pb2.WorkerLoad:
    return common_pb2.WorkerLoad(sessions=3)


async def cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_ids_are_unique_and_name_the_role() -> None:
    first, second = introduction(), introduction()
    assert first.worker_id != second.worker_id
    assert first.worker_id.startswith("target-")
    assert first.version


async def test_introduces_itself_then_reports_its_load() -> None:
    registry = FakeRegistry()
    server = await registry.serve()
    given = introduction()
    task = asyncio.create_task(keep_registered(server.address, given, load))
    await registry.until(lambda: len(registry.loads) >= 3)
    assert registry.introductions == [given]
    assert registry.loads[0] == load()
    await cancel(task)
    await server.stop(grace_s=0)


async def test_a_refusal_is_raised_with_its_reason() -> None:
    server = await FakeRegistry(refusal="another tokenizer").serve()
    with pytest.raises(WorkerRefused, match="another tokenizer"):
        await keep_registered_everywhere([server.address], introduction(), load)
    await server.stop(grace_s=0)


async def test_comes_back_when_a_lease_ends_and_when_the_coordinator_restarts() -> None:
    registry = FakeRegistry(end_after=2)
    server = await registry.serve()
    task = asyncio.create_task(keep_registered(server.address, introduction(), load))
    await registry.until(lambda: len(registry.introductions) >= 2)
    address = server.address
    await server.stop(grace_s=0)
    registry = FakeRegistry()
    server = await registry.serve(address)
    await registry.until(lambda: len(registry.loads) >= 1)
    # A refusal after a lease was held is waited out: the coordinator may still hold the former lease.
    registry.refusal = "registered already"
    await registry.until(lambda: registry.refused >= 2)
    registry.refusal = ""
    count = len(registry.introductions)
    await registry.until(lambda: len(registry.introductions) > count)
    await cancel(task)
    await server.stop(grace_s=0)


async def test_holds_leases_with_every_coordinator() -> None:
    registries = [FakeRegistry(), FakeRegistry()]
    servers = [await registry.serve() for registry in registries]
    addresses = [server.address for server in servers]
    task = asyncio.create_task(keep_registered_everywhere(addresses, introduction(), load))
    await registries[0].until(lambda: len(registries[0].loads) >= 1)
    await registries[1].until(lambda: len(registries[1].loads) >= 1)
    await cancel(task)
    for server in servers:
        await server.stop(grace_s=0)
