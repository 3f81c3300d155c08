"""A coordinator's registry that takes one worker in, or refuses it."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import grpc.aio

from outrider import rpc
from outrider.v1 import common_pb2, registry_pb2, registry_pb2_grpc


class Registry(registry_pb2_grpc.RegistryServiceServicer):
    """A registry that keeps what one worker has said.

    Attributes:
        introduced: how it has introduced itself.
        reported: its slots, as of its first load.
        calibrated: its first report of estimates that were observed.
    """

    def __init__(self, *, refusal: str = "") -> None:
        self._refusal, loop = refusal, asyncio.get_running_loop()
        self.introduced: asyncio.Future[registry_pb2.WorkerIntroduction] = loop.create_future()
        self.reported: asyncio.Future[int] = loop.create_future()
        self.calibrated: asyncio.Future[common_pb2.CalibrationReport] = loop.create_future()

    async def Register(  # noqa: N802
        self, request_iterator: AsyncIterator[registry_pb2.WorkerReport], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[registry_pb2.Lease]:
        async for report in request_iterator:
            if report.draining:
                return
            if self._refusal:
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, self._refusal)
            if report.WhichOneof("report") == "introduction":
                self.introduced.set_result(report.introduction)
                yield registry_pb2.Lease(incarnation=1, heartbeat_interval_ms=10)
            elif not self.reported.done():
                self.reported.set_result(report.load.slots_total)
            if report.load.calibration.rules and not self.calibrated.done():
                self.calibrated.set_result(report.load.calibration)

    async def serve(self) -> rpc.RoleServer:
        """Start the coordinator."""
        coordinator = rpc.RoleServer(
            services=["outrider.v1.RegistryService"],
            add_services=lambda server: registry_pb2_grpc.add_RegistryServiceServicer_to_server(self, server),
            address="127.0.0.1:0",
        )
        await coordinator.start()
        return coordinator
