"""The public door on the wire: unpack, call the scheduler, pack."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio

from outrider import request_decoding, tracing
from outrider.coordinator.api.access import Access
from outrider.coordinator.api.field_checks import abort_unless_known
from outrider.coordinator.api.generations import Generations
from outrider.coordinator.api.packing import response, started
from outrider.coordinator.live.tap import record
from outrider.coordinator.sessions.messages import GenerationRequest
from outrider.errors import FieldViolation, InvalidRequest, OutriderError, Unauthenticated
from outrider.rpc import abort_with
from outrider.v1 import generation_pb2

logger = logging.getLogger(__name__)

SERVICE = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"]
_WATCH_INTERVAL_MS = (100, 1000, 60_000)  # least, default, most


class GenerationServicer:
    """outrider.v1.GenerationService over a scheduler.

    Args:
        generations: the way to the scheduler, which other doors share.
        server_info: the state of the server now.
        access: who may call, and how much; by default everybody. Calls without a token end before they come here
            (`TokenInterceptor`); other doors ask it too.
    """

    def __init__(
        self,
        generations: Generations,
        *,
        server_info: Callable[[], generation_pb2.ServerInfo],
        access: Access | None = None,
    ) -> None:
        self.generations, self._server_info = generations, server_info
        self.access = access or Access()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Add the service to a server."""
        request_decoding.add_service(self, SERVICE, server)

    async def Generate(  # noqa: N802 the protocol's name
        self, request: generation_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        """Started, then deltas and rounds, then exactly one Finished."""
        try:
            caller = self.access.caller(context)
            parent = "" if tracing.active is None else tracing.received(context.invocation_metadata())
            begun = self.generations.stream(request, caller, connection=context.peer(), traceparent=parent)
            async with contextlib.aclosing(begun) as events:
                checked, watcher = await anext(events), None
                assert isinstance(checked, GenerationRequest)
                # Before anything else runs: from its first event on.
                if request.record_tree:
                    watcher = record(self.generations, checked, caller)
                yield started(checked)
                async for event in events:
                    assert not isinstance(event, GenerationRequest)
                    if watcher is not None and (lines := watcher.take()):
                        yield generation_pb2.GenerateResponse(tree=generation_pb2.TreeLines(lines=lines))
                    yield response(event, checked)
        except OutriderError as error:
            await abort_with(context, error)

    async def Abort(  # noqa: N802
        self, request: generation_pb2.AbortRequest, context: Any
    ) -> generation_pb2.AbortResponse:
        """End live requests; ids that are not live are left out of the answer."""
        await abort_unless_known(request, context)
        try:
            caller = self.access.caller(context)
        except Unauthenticated as error:
            await abort_with(context, error)
        aborted = await self.generations.abort(caller, request.request_ids)
        return generation_pb2.AbortResponse(aborted_request_ids=aborted)

    async def GetModelInfo(  # noqa: N802
        self, request: generation_pb2.GetModelInfoRequest, context: Any
    ) -> generation_pb2.GetModelInfoResponse:
        """The model that is served."""
        await abort_unless_known(request, context)
        return generation_pb2.GetModelInfoResponse(
            model=self.generations.model, max_new_tokens_default=self.generations.limits.default_max_new_tokens
        )

    async def GetServerInfo(  # noqa: N802
        self, request: generation_pb2.GetServerInfoRequest, context: Any
    ) -> generation_pb2.ServerInfo:
        """The state of the server now."""
        await abort_unless_known(request, context)
        return self._server_info()

    async def Watch(  # noqa: N802
        self, request: generation_pb2.WatchRequest, context: Any
    ) -> AsyncIterator[generation_pb2.ServerInfo]:
        """The state of the server at once, then at every interval."""
        await abort_unless_known(request, context)
        least, default, most = _WATCH_INTERVAL_MS
        interval_ms = request.interval_ms if request.HasField("interval_ms") else default
        if not least <= interval_ms <= most:
            wrong = FieldViolation("interval_ms", f"{interval_ms} given, {least} to {most} needed")
            await abort_with(context, InvalidRequest([wrong]))
        try:
            with self.access.caller(context).watching():
                while True:
                    yield self._server_info()
                    await asyncio.sleep(interval_ms / 1e3)
        except OutriderError as error:
            await abort_with(context, error)
