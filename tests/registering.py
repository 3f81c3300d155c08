"""A coordinator's registry without the coordinator."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import grpc
import grpc.aio

from outrider import rpc
from outrider.v1 import common_pb2, registry_pb2, registry_pb2_grpc


@dataclass
class Registry(registry_pb2_grpc.RegistryServiceServicer):
    """Gives leases of 10 ms heartbeats, unless it refuses; ends them when the worker drains; notes what it hears."""

    refusal: str = ""
    end_after: int = 1 << 30
    refused: int = 0
    introductions: list[registry_pb2.WorkerIntroduction] = field(default_factory=list)
    loads: list[common_pb2.WorkerLoad] = field(default_factory=list)
    is_left: bool = False
    ends_leases: bool = True
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
                yield registry_pb2.Lease(incarnation=1, heartbeat_interval_ms=10)
            else:
                self.loads.append(report.load)
            if report.draining:
                self.is_left = True
            self.changed.set()
            if report.draining and self.ends_leases:
                return
            heard += 1
            if heard > self.end_after:
                return

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(100):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    async def serve(self, address: str = "127.0.0.1:0") -> rpc.RoleServer:
        server = rpc.RoleServer(
            services=["outrider.v1.RegistryService"],
            add_services=lambda server: registry_pb2_grpc.add_RegistryServiceServicer_to_server(self, server),
            address=address,
        )
        await server.start()
        return server
