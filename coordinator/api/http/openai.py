"""/v1/completions, /v1/chat/completions and /v1/responses: read the request, run it, send what comes.

    JSON ──> Asked ── GenerateRequest, one a prompt ──> Generations ── events ──> Format ──> JSON, or server-sent events

Sampling, limits and tokens are the gRPC door's, since it is the same code. A client that goes away cancels its
generation; one that reads slowly is waited for, and its generation rests meanwhile as at the other door.
"""

import asyncio
import contextlib
import functools
import json
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from outrider import tracing
from outrider.coordinator.api.generations import LARGE_REQUEST_BYTES, Generations
from outrider.coordinator.api.http.chat_template import ChatTemplate, NoChatTemplate
from outrider.coordinator.api.http.errors import error_body
from outrider.coordinator.api.http.fields import Fields, read_json_object
from outrider.coordinator.api.http.formats import ChatFormat, CompletionFormat, WholeChoice
from outrider.coordinator.api.http.parameters import Asked
from outrider.coordinator.api.http.prompt_events import Event, Stream, prompt_events
from outrider.coordinator.api.http.request_metrics import RequestMetrics
from outrider.coordinator.api.http.requests import REQUEST_ID, read_chat, read_completion
from outrider.coordinator.api.http.responses import ResponsesFormat, read_response
from outrider.coordinator.api.validation import max_request_bytes
from outrider.coordinator.sessions.messages import (
    GenerationRequest,
    GenerationResult,
    TokenDelta,
    TokenLogprobs,
)
from outrider.errors import FieldViolation, InvalidRequest, OutriderError
from outrider.rpc import MAX_MESSAGE_BYTES
from outrider.v1 import generation_pb2

# JSON takes more room than the same request by gRPC: digits and commas, and escapes of what is not ASCII.
_JSON_FACTOR = 3
_EVENT_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Proxies that collect a response before they pass it on would spoil it.
    (b"x-accel-buffering", b"no"),
]

REQUEST_ID_HEADER = "x-request-id"

Format = CompletionFormat | ChatFormat | ResponsesFormat


class UntilDisconnect:
    """A block that is cancelled, and left in silence, when the client disconnects.

    Args:
        receive: of ASGI; the request's body has been read from it.
    """

    def __init__(self, receive: Any) -> None:
        self._receive = receive
        self._is_gone = self._is_answered = False

    def answered(self) -> None:
        """Note that the response ends; called before its end is sent, which is then no disconnection."""
        self._is_answered = True

    async def __aenter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._watcher = asyncio.create_task(self._watch(), name="http disconnect")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        self._is_answered = True
        self._watcher.cancel()
        # Cancelled by somebody else as well: that goes on.
        return self._is_gone and self._task.uncancel() == 0 and kind is asyncio.CancelledError

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self._is_answered:
            self._is_gone = True
            self._task.cancel()


def openai_routes(generations: Generations, template: ChatTemplate | NoChatTemplate) -> list[BaseRoute]:
    """The routes of all three."""
    chat, response = (functools.partial(read, template=template) for read in (read_chat, read_response))
    endpoints = {
        "/v1/completions": Endpoint(generations, read_completion, CompletionFormat),
        "/v1/chat/completions": Endpoint(generations, chat, ChatFormat),
        "/v1/responses": Endpoint(generations, response, ResponsesFormat),
    }
    return [Route(path, endpoint, methods=["POST"]) for path, endpoint in endpoints.items()]


class Endpoint:
    """One of them, as an ASGI application.

    Args:
        read: makes an `Asked` of a request's JSON, for the served model's name, its tokenizer and the id that the
            request's headers name.
    """

    def __init__(self, generations: Generations, read: Callable[..., Asked], new_format: Callable[..., Format]) -> None:
        self._generations, self._read, self._new_format = generations, read, new_format
        largest = max_request_bytes(generations.model, generations.tokenizer)
        self._most_bytes = min(MAX_MESSAGE_BYTES, _JSON_FACTOR * largest)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one request."""
        # As at the other door: what finds no room costs no more than this.
        self._generations.check_room()
        try:
            asked = await self._asked(scope, receive)
        except OutriderError as error:
            self._generations.on_refusal(error)
            raise
        if tracing.active is not None:
            asked = replace(asked, traceparent=Request(scope).headers.get(tracing.HEADER, ""))
        response = _Response(asked, self._format(asked))
        async with (
            UntilDisconnect(receive) as connection,
            contextlib.aclosing(prompt_events(self._stream_of(scope, asked), self._generations.check, asked)) as events,
        ):
            if asked.stream:
                await response.stream(events, send, connection)
            else:
                content = await response.collect(events)
                connection.answered()
                await Response(content, media_type="application/json")(scope, receive, send)

    def _stream_of(self, scope: Any, asked: Asked) -> Stream:
        # Not the request's id: clients choose that, and whoever has another's entry passes the bound of the queue.
        connection, queued_as = str(scope.get("client")), uuid.uuid4().hex if len(asked.requests) > 1 else ""
        return functools.partial(
            self._generations.stream,
            caller=scope["state"]["caller"],
            connection=connection,
            queued_as=queued_as,
            traceparent=asked.traceparent,
            is_new=asked.is_new,
        )

    async def _asked(self, scope: Any, receive: Any) -> Asked:
        content, size = await read_json_object(scope, receive, most_bytes=self._most_bytes)
        content, request_id = self._generations.with_own_name(content), header_id(scope)
        try:
            if size < LARGE_REQUEST_BYTES:
                return self._read_fields(Fields(content), request_id)
            return await asyncio.to_thread(self._read_fields, Fields(content), request_id)
        except RecursionError as error:
            raise InvalidRequest([FieldViolation("body", "nested too deeply")]) from error

    def _read_fields(self, fields: Fields, request_id: str | None = None) -> Asked:
        model, tokenizer = self._generations.model.name, self._generations.tokenizer
        return self._read(fields, model=model, tokenizer=tokenizer, request_id=request_id)

    def schema(self) -> dict[str, Any]:
        """Return the JSON schema of a request: the fields that are read, and those that an empty one lacks."""
        fields = Fields({})
        with contextlib.suppress(InvalidRequest):
            self._read_fields(fields)
        missing = {violation.field for violation in fields.violations} & fields.known.keys()
        return {"type": "object", "properties": fields.known, "required": sorted(missing)}

    def _format(self, asked: Asked) -> Format:
        model, tokenizer = self._generations.model.name, self._generations.tokenizer
        return self._new_format(asked, model=model, created=int(time.time()), tokenizer=tokenizer)


class _Response:
    """One response as its events come."""

    def __init__(self, asked: Asked, form: Format) -> None:
        self._asked, self._format = asked, form
        self._metrics = RequestMetrics(asked.metrics)
        self._prompts: dict[int, Sequence[int]] = {}
        # Tokens of each prompt that are scored; of each choice, what its format makes of them.
        self._scored = Counter[int]()
        self._scores = defaultdict[int, list[Sequence[str]]](list)
        self._begun: set[int] = set()

    async def stream(
        self, events: AsyncGenerator[tuple[int, Event], None], send: Any, connection: UntilDisconnect
    ) -> None:
        """Send every event as it comes; until all of the response's prompts are accepted an error has a status."""
        while len(self._prompts) < len(self._asked.requests):
            prompt, event = await anext(events)
            assert isinstance(event, GenerationRequest)
            self._begin(prompt, event)
        await send({"type": "http.response.start", "status": 200, "headers": _EVENT_STREAM})
        try:
            async for prompt, event in events:
                if text := self._chunks(prompt, event):
                    await send({"type": "http.response.body", "body": text.encode("ascii"), "more_body": True})
            end = self._format.end(self._metrics.usage(), self._metrics.metrics())
        except OutriderError as error:
            end = self._format.failed(error_body(error))
        connection.answered()
        await send({"type": "http.response.body", "body": end.encode("ascii"), "more_body": False})

    async def collect(self, events: AsyncGenerator[tuple[int, Event], None]) -> str:
        """The whole response."""
        choices: dict[int, WholeChoice] = {}
        async for prompt, event in events:
            first = prompt * self._asked.choices
            if isinstance(event, TokenDelta):
                self._metrics.completion_tokens += len(event.token_ids)
                index = first + event.index
                choices[index].take(event, self._format.logprobs(event, index))
            elif isinstance(event, GenerationRequest):
                self._begin(prompt, event)
                for index in range(first, first + event.n):
                    choices[index] = WholeChoice(event.prompt_token_ids, self._asked.echo[prompt], self._scores[index])
            elif isinstance(event, TokenLogprobs):
                self._take_scores(prompt, event)
            elif isinstance(event, GenerationResult):
                self._metrics.note_result(event)
                for result in event.choices:
                    choices[first + result.index].result = result
            else:
                self._metrics.note_round(event)
        ordered = [choices[index] for index in sorted(choices)]
        return self._format.whole(ordered, self._metrics.usage(), self._metrics.metrics())

    def _begin(self, prompt: int, request: GenerationRequest) -> None:
        self._prompts[prompt] = request.prompt_token_ids
        self._metrics.begin(request)

    def _chunks(self, prompt: int, event: Event) -> str:
        """Return the text that an event adds to the stream."""
        asked = self._asked
        first = prompt * asked.choices
        if isinstance(event, TokenDelta):
            self._metrics.completion_tokens += len(event.token_ids)
            index, start = first + event.index, ""
            if index not in self._begun:
                start = self._first(prompt, index)
            usage = json.dumps(self._metrics.usage()) if asked.continuous_usage else ""
            return start + self._format.chunk(event, index, usage)
        if isinstance(event, GenerationResult):
            self._metrics.note_result(event)
            usage = json.dumps(self._metrics.usage()) if asked.continuous_usage else ""
            chunks = []
            for result in event.choices:
                index = first + result.index
                if index not in self._begun:
                    chunks.append(self._first(prompt, index))
                chunks.append(self._format.last(result, index, usage))
            return "".join(chunks)
        if isinstance(event, generation_pb2.Round):
            self._metrics.note_round(event)
        elif isinstance(event, TokenLogprobs):
            self._take_scores(prompt, event)
        return ""

    def _first(self, prompt: int, index: int) -> str:
        self._begun.add(index)
        return self._format.first(index, self._prompts[prompt], self._asked.echo[prompt], self._scores[index])

    def _take_scores(self, prompt: int, scores: TokenLogprobs) -> None:
        """Keep the log probabilities of the prompt's next tokens as JSON; the first token has none."""
        start = self._scored[prompt]
        end = self._scored[prompt] = max(start, 1) + len(scores.token_logprobs)
        token_ids, first = self._prompts[prompt][start:end], prompt * self._asked.choices
        for index in range(first, first + self._asked.choices):
            told = TokenDelta(index=index, token_ids=token_ids, text="", offset=start, text_offset=0, logprobs=scores)
            self._scores[index].append(self._format.logprobs(told, index))


def header_id(scope: Any) -> str | None:
    """The id that a proxy in front gave the request; one of another form is not used."""
    given = Request(scope).headers.get(REQUEST_ID_HEADER)
    return given if given and REQUEST_ID.fullmatch(given) else None
