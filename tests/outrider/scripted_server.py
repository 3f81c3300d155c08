"""A generation service that answers by a script."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import grpc.aio

from outrider.errors import OutriderError, WorkerRefused
from outrider.rpc import abort_with
from outrider.v1 import common_pb2, generation_pb2, generation_pb2_grpc, target_pb2
from outrider.wire import floats_to_bytes

TEXT = "Grüße, 🙂 world"
Request = generation_pb2.GenerateRequest
Response = generation_pb2.GenerateResponse
Script = Callable[[Request, int], AsyncIterator[Response]]


def started(request: Request) -> Response:
    seed = request.sampling_params.seed if request.sampling_params.HasField("seed") else 99
    return Response(started=generation_pb2.Started(request_id=request.request_id or "made", seed=seed, prompt_tokens=4))


def delta(position: int, *, count: int = 1, index: int = 0) -> Response:
    """Token `position` is character `position` of the text."""
    message = generation_pb2.Delta(
        index=index,
        token_ids=range(position, position + count),
        text=TEXT[position : position + count],
        offset=position,
        text_offset=len(TEXT[:position].encode()),
    )
    message.logprobs.CopyFrom(
        target_pb2.Logprobs(
            token_logprobs=floats_to_bytes([-float(p) for p in range(position, position + count)]),
            top_count=2,
            top_token_ids=[p * 10 + k for p in range(position, position + count) for k in range(2)],
            top_logprobs=floats_to_bytes([v for p in range(position, position + count) for v in (-float(p), -9.0)]),
        )
    )
    return Response(delta=message)


def finished(n: int = 1) -> Response:
    return Response(
        finished=generation_pb2.Finished(
            choices=[
                generation_pb2.Choice(
                    index=index,
                    finish_reason=generation_pb2.FINISH_REASON_STOP,
                    completion_tokens=len(TEXT),
                    stop_string="\n",
                )
                for index in range(n)
            ],
            usage=generation_pb2.Usage(prompt_tokens=4, completion_tokens=n * len(TEXT), cached_tokens=3),
            speculation=generation_pb2.SpeculationStats(
                verify_steps=5,
                spec_draft_tokens=40,
                spec_accepted_tokens=10,
                acceptance_length=3.0,
                sources=[
                    generation_pb2.SourceStats(
                        source=common_pb2.GROWTH_SOURCE_NGRAM, drafted_tokens=9, submitted_tokens=8, accepted_tokens=7
                    )
                ],
            ),
            timings=generation_pb2.Timings(queue_ms=1, ttft_ms=2, tpot_ms=3, total_ms=4),
        )
    )


class ScriptedServicer:
    def __init__(self, script: Script) -> None:
        self.script = script
        self.requests: list[Request] = []
        self.ended = threading.Event()

    async def Generate(self, request: Request, context: Any) -> AsyncIterator[Response]:  # noqa: N802
        self.requests.append(request)
        try:
            async for response in self.script(request, len(self.requests) - 1):
                yield response
        except OutriderError as error:
            await abort_with(context, error)
        except ConnectionError:
            # As gRPC tells of a connection that is gone: without the details that every error of ours has.
            await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        finally:
            self.ended.set()

    async def Abort(self, request: Any, context: Any) -> generation_pb2.AbortResponse:  # noqa: N802
        return generation_pb2.AbortResponse(aborted_request_ids=request.request_ids[:1])

    async def GetModelInfo(self, request: Any, context: Any) -> generation_pb2.GetModelInfoResponse:  # noqa: N802
        return generation_pb2.GetModelInfoResponse(max_new_tokens_default=128)

    async def GetServerInfo(self, request: Any, context: Any) -> generation_pb2.ServerInfo:  # noqa: N802
        await abort_with(context, WorkerRefused("another tokenizer"))

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[generation_pb2.ServerInfo]:  # noqa: N802
        for count in range(10):
            yield generation_pb2.ServerInfo(running_sessions=count)


@contextlib.contextmanager
def serving_in_thread(servicer: Any) -> Iterator[str]:
    """Its host:port: a server in a thread with an event loop of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> tuple[grpc.aio.Server, int]:
        server = grpc.aio.server()
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        return server, port

    server, port = asyncio.run_coroutine_threadsafe(start(), loop).result(30)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(0), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@contextlib.contextmanager
def serving(script: Script) -> Iterator[tuple[ScriptedServicer, str]]:
    """A scripted server, so that both clients can be tested alike, and its host:port."""
    servicer = ScriptedServicer(script)
    with serving_in_thread(servicer) as endpoint:
        yield servicer, endpoint


async def whole(request: Request, _: int) -> AsyncIterator[Response]:
    yield started(request)
    for position in range(0, len(TEXT), 3):
        yield delta(position, count=min(3, len(TEXT) - position))
    yield Response(round=generation_pb2.Round(step=1))
    yield finished()
