"""Clients and their streams, blocking and in asyncio; `outrider.client` says how they are used (torch-free)."""

import asyncio
import functools
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Iterator, Sequence
from typing import Any, Self, TypeVar, Unpack

import grpc
import grpc.aio

from outrider import tracing
from outrider.client.endpoints import Endpoint, Endpoints, endpoint_list
from outrider.client.errors import error_of
from outrider.client.outputs import ChoiceOutput, Delta, GenerationOutput
from outrider.client.progress import Progress
from outrider.client.request import GenerateOptions
from outrider.errors import Overloaded, WorkerUnavailable
from outrider.rpc import CHANNEL_OPTIONS
from outrider.security.bearer import authorized, check_transport
from outrider.security.tls import TlsConfig
from outrider.v1 import generation_pb2, generation_pb2_grpc

_Answer = TypeVar("_Answer")

# Of calls that answer at once.
_CALL_TIMEOUT_S = 10.0
# A restarted server is found again within a second; gRPC's own default backs off to two minutes.
_OPTIONS = [
    *CHANNEL_OPTIONS,
    ("grpc.initial_reconnect_backoff_ms", 100),
    # How long an attempt may take, in spite of its name: a busy machine needs more than the first pause to answer.
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]


class _Received:
    """A generation as far as it has come."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    @property
    def result(self) -> GenerationOutput:
        """The whole generation.

        Raises:
            RuntimeError: the stream has not ended.
        """
        return self._progress.result()

    @property
    def choices(self) -> list[ChoiceOutput]:
        """Choices received so far, one entry a choice; readable after an error, too."""
        return self._progress.choices()

    @property
    def rounds(self) -> list[generation_pb2.Round]:
        """The verifications so far, of a request with `trace`."""
        return self._progress.rounds

    @property
    def tree_lines(self) -> list[str]:
        """The token tree's events so far, of a request with `record_tree`: lines of docs/live-page.md's format."""
        return self._progress.tree_lines


class AsyncStream(_Received):
    """One generation as it comes: iterate over its deltas, then read `result`.

    Close it (or use it as an `async with` block) to stop before the end; the server then stops within a step.
    """

    def __init__(self, endpoints: Endpoints[Any], progress: Progress) -> None:
        super().__init__(progress)
        self._deltas = _run_async(endpoints, progress)

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self._deltas

    async def aclose(self) -> None:
        """Stop the generation; harmless when it has ended."""
        await self._deltas.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class _Connected:
    """Channels to one or several coordinators; see `AsyncClient`."""

    _grpc: Any
    """The module of the channels: grpc or grpc.aio."""

    def __init__(
        self,
        endpoint: str | Sequence[str],
        *,
        connections: int = 1,
        max_resumes: int = 20,
        tls: TlsConfig | None = None,
        token: str | None = None,
        insecure: bool = False,
    ) -> None:
        if connections < 1:
            raise ValueError(f"connections: {connections} given, at least 1 needed")
        addresses = endpoint_list(endpoint)
        for address in addresses:
            check_transport(address, tls=tls, token=token, insecure=insecure)
        # Channels to one address have one connection together, unless each keeps its own.
        options = [*_OPTIONS, ("grpc.use_local_subchannel_pool", int(connections > 1))]
        if tls is None:
            connect = functools.partial(self._grpc.insecure_channel, options=options)
        else:
            credentials = tls.channel_credentials()
            connect = functools.partial(self._grpc.secure_channel, credentials=credentials, options=options)
        self._endpoints = Endpoints[Any](
            addresses * connections,
            connect,
            lambda channel: authorized(generation_pb2_grpc.GenerationServiceStub(channel), token),
        )
        self.endpoints = tuple(dict.fromkeys(each.address for each in self._endpoints))
        self.endpoint = self.endpoints[0]
        self._max_resumes = max_resumes

    def _progress(self, prompt: str | Sequence[int], options: GenerateOptions) -> Progress:
        return Progress(prompt, options, max_resumes=self._max_resumes, endpoints=len(self._endpoints))


class AsyncClient(_Connected):
    """A connection to a coordinator, or to several that serve the same.

    Args:
        endpoint: host:port, or several: with commas between them, or as a sequence.
        connections: to each; where several coordinators listen at one address, each connection leads to one of them.
        max_resumes: attempts in a row at each, without a new token between them, to resume a stream that broke.
        tls: whom to believe; the coordinator's certificate has to name the endpoint's host. None talks in the clear.
        token: who this client is, where the service asks for it.
        insecure: send the token even where others may read it.

    Raises:
        InvalidRequest: a token without TLS, to another machine.
        CertificateError: a file of `tls` cannot be read.
    """

    _grpc = grpc.aio

    def stream(self, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]) -> AsyncStream:
        """Start a generation at the first iteration over the returned stream.

        Raises:
            InvalidRequest: an option cannot be put into a request; the server checks the rest.
        """
        return AsyncStream(self._endpoints, self._progress(prompt, options))

    async def generate(self, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]) -> GenerationOutput:
        """Generate to the end and return the whole output.

        Raises:
            OutriderError: as the server says; see `outrider.errors`.
            TimeoutError: `timeout_s` has passed.
        """
        async with self.stream(prompt, **options) as stream:
            async for _ in stream:
                pass
        return stream.result

    async def abort(self, *request_ids: str) -> list[str]:
        """End live requests, wherever they are; return the ids that were live."""
        request = generation_pb2.AbortRequest(request_ids=request_ids)
        answers = await asyncio.gather(
            *(_answer(endpoint.stub.Abort(request, timeout=_CALL_TIMEOUT_S)) for endpoint in self._endpoints),
            return_exceptions=True,
        )
        return _aborted(answers)

    async def model_info(self) -> generation_pb2.GetModelInfoResponse:
        """Return the served model and its default output length."""
        request = generation_pb2.GetModelInfoRequest()
        return await self._ask(lambda stub: stub.GetModelInfo(request, timeout=_CALL_TIMEOUT_S))

    async def server_info(self) -> generation_pb2.ServerInfo:
        """The state of the first server that answers: load, workers, totals."""
        request = generation_pb2.GetServerInfoRequest()
        return await self._ask(lambda stub: stub.GetServerInfo(request, timeout=_CALL_TIMEOUT_S))

    async def watch(self, *, interval_ms: int = 1000) -> AsyncGenerator[generation_pb2.ServerInfo, None]:
        """The state of one server at once, then at every interval, until the iteration is closed."""
        call = self._endpoints.in_order()[0].stub.Watch(generation_pb2.WatchRequest(interval_ms=interval_ms))
        try:
            async for info in call:
                yield info
        except grpc.RpcError as error:
            raise error_of(error) from error
        finally:
            call.cancel()

    async def close(self) -> None:
        """End all calls and the connection."""
        for endpoint in self._endpoints:
            await endpoint.channel.close()

    async def _ask(self, call: Callable[[Any], Awaitable[_Answer]]) -> _Answer:
        """The answer of the first that is there."""
        reason = WorkerUnavailable("no endpoint is known")
        for endpoint in self._endpoints.in_order():
            try:
                return await _answer(call(endpoint.stub))
            except WorkerUnavailable as error:
                endpoint.note_failure()
                reason = error
        raise reason

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class Stream(_Received):
    """One generation as it comes: iterate over its deltas, then read `result`; see `AsyncStream`."""

    def __init__(self, endpoints: Endpoints[Any], progress: Progress) -> None:
        super().__init__(progress)
        self._deltas = _run(endpoints, progress)

    def __iter__(self) -> Iterator[Delta]:
        return self._deltas

    def close(self) -> None:
        """Stop the generation; harmless when it has ended."""
        self._deltas.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Client(_Connected):
    """A connection to one or several coordinators, for code without an event loop; see `AsyncClient`."""

    _grpc = grpc

    def stream(self, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]) -> Stream:
        """Start a generation at the first iteration over the returned stream.

        Raises:
            InvalidRequest: an option cannot be put into a request; the server checks the rest.
        """
        return Stream(self._endpoints, self._progress(prompt, options))

    def generate(self, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]) -> GenerationOutput:
        """Generate to the end and return the whole output.

        Raises:
            OutriderError: as the server says; see `outrider.errors`.
            TimeoutError: `timeout_s` has passed.
        """
        with self.stream(prompt, **options) as stream:
            for _ in stream:
                pass
        return stream.result

    def abort(self, *request_ids: str) -> list[str]:
        """End live requests, wherever they are; return the ids that were live."""
        request = generation_pb2.AbortRequest(request_ids=request_ids)
        answers: list[Any] = []
        for endpoint in self._endpoints:
            try:
                answers.append(endpoint.stub.Abort(request, timeout=_CALL_TIMEOUT_S))
            except grpc.RpcError as error:
                answers.append(error_of(error))
        return _aborted(answers)

    def model_info(self) -> generation_pb2.GetModelInfoResponse:
        """Return the served model and its default output length."""
        request = generation_pb2.GetModelInfoRequest()
        return self._ask(lambda stub: stub.GetModelInfo(request, timeout=_CALL_TIMEOUT_S))

    def server_info(self) -> generation_pb2.ServerInfo:
        """The state of the first server that answers: load, workers, totals."""
        request = generation_pb2.GetServerInfoRequest()
        return self._ask(lambda stub: stub.GetServerInfo(request, timeout=_CALL_TIMEOUT_S))

    def close(self) -> None:
        """End all calls and the connection."""
        for endpoint in self._endpoints:
            endpoint.channel.close()

    def _ask(self, call: Callable[[Any], _Answer]) -> _Answer:
        """The answer of the first that is there."""
        reason = WorkerUnavailable("no endpoint is known")
        for endpoint in self._endpoints.in_order():
            try:
                return call(endpoint.stub)
            except grpc.RpcError as failure:
                error = error_of(failure)
                if not isinstance(error, WorkerUnavailable):
                    raise error from failure
                endpoint.note_failure()
                reason = error
        raise reason

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


async def _answer(call: Awaitable[_Answer]) -> _Answer:
    try:
        return await call
    except grpc.RpcError as error:
        raise error_of(error) from error


def _aborted(answers: Sequence[Any]) -> list[str]:
    """Return the ids that any coordinator aborted, sorted; raise the first error if none answered."""
    answered = [answer for answer in answers if isinstance(answer, generation_pb2.AbortResponse)]
    if not answered:
        raise answers[0]
    return sorted({request_id for answer in answered for request_id in answer.aborted_request_ids})


# The streams' loops hold no stream, so that one which is dropped unread ends at once.
async def _run_async(endpoints: Endpoints[Any], progress: Progress) -> AsyncGenerator[Delta, None]:
    route = endpoints.route()
    with tracing.client_call() as metadata:
        while not progress.is_finished:
            endpoint = next(route)
            call: Any = endpoint.stub.Generate(progress.request(), timeout=progress.remaining_s(), metadata=metadata)
            try:
                async for response in call:
                    endpoint.has_answered = True
                    for delta in progress.take(response):
                        yield delta
                break
            except grpc.RpcError as failure:
                pause_s = _pause_s(failure, endpoint, endpoints, progress)
            finally:
                # Leaving the loop does not end the call by itself.
                call.cancel()
            await asyncio.sleep(pause_s)
        progress.check_complete()


def _run(endpoints: Endpoints[Any], progress: Progress) -> Generator[Delta, None, None]:
    route = endpoints.route()
    with tracing.client_call() as metadata:
        while not progress.is_finished:
            endpoint = next(route)
            call: Any = endpoint.stub.Generate(progress.request(), timeout=progress.remaining_s(), metadata=metadata)
            try:
                for response in call:
                    endpoint.has_answered = True
                    yield from progress.take(response)
                break
            except grpc.RpcError as failure:
                pause_s = _pause_s(failure, endpoint, endpoints, progress)
            finally:
                call.cancel()
            time.sleep(pause_s)
        progress.check_complete()


def _pause_s(failure: grpc.RpcError, endpoint: Endpoint[Any], endpoints: Endpoints[Any], progress: Progress) -> float:
    """Return the pause before the next attempt, in seconds; raise the failure if there is to be none."""
    if progress.is_finished:
        # All has come: how the call ended does not matter.
        return 0.0
    error = error_of(failure)
    # A request that is wrong, or was given too little time, says nothing of who was asked.
    if isinstance(error, WorkerUnavailable | Overloaded):
        endpoint.note_failure()
    return progress.pause_before_resuming_s(error, is_new=endpoints.is_new(failure))
