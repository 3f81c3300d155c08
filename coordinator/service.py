"""The public door on the wire: unpack, call the scheduler, pack."""

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import grpc.aio

from outrider import request_decoding
from outrider.coordinator.access import Access, Caller
from outrider.coordinator.messages import GenerationEvent, GenerationRequest, TokenDelta
from outrider.coordinator.packing import response, started
from outrider.coordinator.text_stream import TextStream
from outrider.coordinator.tokenizer import TextTokenizer
from outrider.coordinator.validation import RequestLimits, RequestValidator, check_known_fields
from outrider.errors import FieldViolation, InvalidRequest, OutriderError, Superseded, Unauthenticated
from outrider.rpc import abort_with
from outrider.v1 import common_pb2, generation_pb2

logger = logging.getLogger(__name__)

SERVICE = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"]
# A request of this size is checked, its prompt tokenised, outside the event loop.
_LARGE_REQUEST_BYTES = 16 << 10
_WATCH_INTERVAL_MS = (100, 1000, 60_000)  # least, default, most


class RunningGeneration(Protocol):
    """The events of one request, as the scheduler gives them."""

    def __aiter__(self) -> AsyncIterator[GenerationEvent]: ...

    def cancel(self) -> None:
        """Stops the work and frees what it holds; harmless when it has ended."""

    def abort(self, error: OutriderError) -> None:
        """Ends the iteration with the error."""


class Submitter(Protocol):
    """What the service needs of the scheduler."""

    def check_room(self, choices: int = 1) -> None:
        """Whether a request of so many choices would find room.

        Raises:
            Overloaded: it would not.
        """

    def submit(self, request: GenerationRequest, text_streams: Sequence[TextStream]) -> RunningGeneration:
        """Starts a request, one text stream a choice.

        Raises:
            Overloaded: the queue is full.
            WorkerUnavailable: there is no target.
        """
        ...


@dataclass(frozen=True)
class _Live:
    generation: RunningGeneration
    seed: int


class GenerationServicer:
    """outrider.v1.GenerationService over a scheduler.

    Args:
        scheduler: takes validated requests.
        model: that is served; read at every request, so that it may be completed when a target registers.
        tokenizer: None where the model has none.
        limits: bounds and defaults of requests.
        server_info: the state of the server now.
        access: who may call, and how much; by default everybody. Calls without a token end before they come here
            (`TokenInterceptor`).
    """

    def __init__(
        self,
        scheduler: Submitter,
        *,
        model: common_pb2.ModelInfo,
        tokenizer: TextTokenizer | None,
        limits: RequestLimits,
        server_info: Callable[[], generation_pb2.ServerInfo],
        access: Access | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._model = model
        self._limits = limits
        self._validator = RequestValidator(model, tokenizer, limits)
        self._server_info = server_info
        self._access = access or Access()
        self._live: dict[tuple[str, str], _Live] = {}

    def add_to(self, server: grpc.aio.Server) -> None:
        """Adds the service to a server."""
        request_decoding.add_service(self, SERVICE, server)

    async def Generate(  # noqa: N802 the protocol's name
        self, request: generation_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        """Started, then deltas and rounds, then exactly one Finished."""
        request_id = request.request_id or uuid.uuid4().hex
        try:
            caller = self._access.caller(context)
            # First of all: under overload, time spent on the tokens of prompts is taken from those that run.
            self._scheduler.check_room()
            with caller.admitted(request_id, choices=request.sampling_params.n or 1):
                async with contextlib.aclosing(self._generate(request, request_id, caller)) as responses:
                    async for each in responses:
                        yield each
        except OutriderError as error:
            await abort_with(context, error)

    async def _generate(
        self, request: generation_pb2.GenerateRequest, request_id: str, caller: Caller
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        # By caller: nobody learns of another's requests, or ends them, by guessing their ids.
        key = (caller.name, request_id)
        checked, text_streams = await self._check(request, key)
        checked = replace(checked, caller=caller.name)
        generation = self._scheduler.submit(checked, text_streams)
        # Only now: a request that cannot be taken over is better off with its old stream.
        self._end_live(key, "another stream took it over")
        live = self._live[key] = _Live(generation, checked.sampling.seed)
        try:
            yield started(checked)
            async for event in generation:
                if isinstance(event, TokenDelta):
                    caller.note_output(len(event.token_ids))
                yield response(event, checked)
        except OutriderError as error:
            logger.info("request %s ends with %s: %s", request_id, type(error).__name__, error)
            raise
        finally:
            # Reached also when the client cancels or disconnects: the handler is then cancelled or closed.
            generation.cancel()
            if self._live.get(key) is live:
                del self._live[key]

    async def Abort(  # noqa: N802
        self, request: generation_pb2.AbortRequest, context: Any
    ) -> generation_pb2.AbortResponse:
        """Ends live requests; ids that are not live are left out of the answer."""
        await _check_known_fields(request, context)
        try:
            name = self._access.caller(context).name
        except Unauthenticated as error:
            await abort_with(context, error)
        aborted = [
            request_id
            for request_id in dict.fromkeys(request.request_ids)
            if self._end_live((name, request_id), "it was aborted")
        ]
        return generation_pb2.AbortResponse(aborted_request_ids=aborted)

    async def GetModelInfo(  # noqa: N802
        self, request: generation_pb2.GetModelInfoRequest, context: Any
    ) -> generation_pb2.GetModelInfoResponse:
        """The model that is served."""
        await _check_known_fields(request, context)
        return generation_pb2.GetModelInfoResponse(
            model=self._model, max_new_tokens_default=self._limits.default_max_new_tokens
        )

    async def GetServerInfo(  # noqa: N802
        self, request: generation_pb2.GetServerInfoRequest, context: Any
    ) -> generation_pb2.ServerInfo:
        """The state of the server now."""
        await _check_known_fields(request, context)
        return self._server_info()

    async def Watch(  # noqa: N802
        self, request: generation_pb2.WatchRequest, context: Any
    ) -> AsyncIterator[generation_pb2.ServerInfo]:
        """The state of the server at once, then at every interval."""
        await _check_known_fields(request, context)
        least, default, most = _WATCH_INTERVAL_MS
        interval_ms = request.interval_ms if request.HasField("interval_ms") else default
        if not least <= interval_ms <= most:
            wrong = FieldViolation("interval_ms", f"{interval_ms} given, {least} to {most} needed")
            await abort_with(context, InvalidRequest([wrong]))
        try:
            with self._access.caller(context).watching():
                while True:
                    yield self._server_info()
                    await asyncio.sleep(interval_ms / 1e3)
        except OutriderError as error:
            await abort_with(context, error)

    async def _check(
        self, request: generation_pb2.GenerateRequest, key: tuple[str, str]
    ) -> tuple[GenerationRequest, list[TextStream]]:
        request_id, live = key[1], self._live.get(key)
        seed = live.seed if live is not None else None
        if request.ByteSize() < _LARGE_REQUEST_BYTES:
            return self._validator.check(request, request_id=request_id, known_seed=seed)
        return await asyncio.to_thread(self._validator.check, request, request_id=request_id, known_seed=seed)

    def _end_live(self, key: tuple[str, str], reason: str) -> bool:
        live = self._live.pop(key, None)
        if live is not None:
            live.generation.abort(Superseded(f"request {key[1]} ended: {reason}"))
        return live is not None


async def _check_known_fields(request: Any, context: Any) -> None:
    try:
        check_known_fields(request)
    except InvalidRequest as error:
        await abort_with(context, error)
