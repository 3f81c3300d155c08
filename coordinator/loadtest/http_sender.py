"""Requests to an OpenAI-compatible door: /v1/completions, streamed as server-sent events."""

import asyncio
import itertools
import json
import ssl
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing
from itertools import accumulate
from typing import Any

from outrider.coordinator.loadtest.http_connection import HttpConnection, HttpError, server_sent_events
from outrider.coordinator.loadtest.records import RequestRecord
from outrider.coordinator.loadtest.senders import Ask
from outrider.coordinator.loadtest.workloads import Prompt
from outrider.security.bearer import check_transport
from outrider.security.tls import TlsConfig

_PATH, _MODELS_PATH = "/v1/completions", "/v1/models"
_MODELS_TIMEOUT_S = 30.0


class HttpSender:
    """Connections to all endpoints, as many as there are requests under way; requests take the endpoints in turn.

    Args:
        model: that requests name; None asks the server.
    """

    def __init__(
        self, endpoints: Sequence[str], *, model: str | None, tls: TlsConfig | None = None, token: str | None = None
    ) -> None:
        for endpoint in endpoints:
            check_transport(endpoint, tls=tls, token=token, insecure=False)
        self._model = model
        self._ssl = None if tls is None else ssl.create_default_context(cafile=str(tls.ca))
        self._headers = {"content-type": "application/json", "accept": "text/event-stream"}
        if token is not None:
            self._headers["authorization"] = f"Bearer {token}"
        self._idle: dict[str, list[HttpConnection]] = {endpoint: [] for endpoint in endpoints}
        self._endpoints: Iterator[str] = itertools.cycle(endpoints)

    async def prepare(self) -> None:
        """Ask for the model's name where none was given.

        Raises:
            HttpError: the server does not say.
            OSError: it is not there.
        """
        if self._model is None:
            try:
                async with asyncio.timeout(_MODELS_TIMEOUT_S):
                    self._model = (await self.ask("GET", _MODELS_PATH))["data"][0]["id"]
            except OSError:
                # A certificate that is not trusted is a ValueError, too.
                raise
            except (ValueError, LookupError, TypeError) as error:
                raise HttpError(f"{_MODELS_PATH} names no model; give --model") from error

    async def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Send the first endpoint a request that does not count as load, and return the answer's JSON.

        Raises:
            HttpError: it is refused.
            OSError: nobody is there.
            ValueError: the answer is no JSON.
        """
        endpoint = next(iter(self._idle))
        connection = await self._connection(endpoint)
        content = b"" if body is None else json.dumps(body).encode()
        try:
            parts = [part async for part in connection.request(method, path, headers=self._headers, body=content)]
        finally:
            self._give_back(endpoint, connection)
        return json.loads(b"".join(parts))

    async def send(self, ask: Ask, record: RequestRecord, *, begin_s: float) -> Prompt:
        """One request, to its end; see `Sender`."""
        record.endpoint = next(self._endpoints)
        body = json.dumps(self._body(ask)).encode()
        reply = _Reply(ask, record, begin_s)
        connection = None
        record.sent_s = time.monotonic() - begin_s
        try:
            async with asyncio.timeout(ask.timeout_s):
                connection = await self._connection(record.endpoint)
                async with aclosing(connection.request("POST", _PATH, headers=self._headers, body=body)) as parts:
                    async for part in parts:
                        reply.take(part)
            reply.finish()
        except (HttpError, OSError, TimeoutError, ValueError) as error:
            record.error = f"{type(error).__name__}: {error}"
        finally:
            self._give_back(record.endpoint, connection)
        return reply.whole()

    async def close(self) -> None:
        """End the connections."""
        for connections in self._idle.values():
            for connection in connections:
                connection.close()

    async def _connection(self, endpoint: str) -> HttpConnection:
        while self._idle[endpoint]:
            connection = self._idle[endpoint].pop()
            if not connection.was_closed:
                return connection
            connection.close()
        host, _, port = endpoint.rpartition(":")
        connection = HttpConnection(host.strip("[]"), int(port), tls=self._ssl)
        await connection.open()
        return connection

    def _give_back(self, endpoint: str, connection: HttpConnection | None) -> None:
        if connection is not None and connection.is_open:
            self._idle[endpoint].append(connection)
        elif connection is not None:
            connection.close()

    def _body(self, ask: Ask) -> dict[str, Any]:
        return {
            "model": self._model,
            "prompt": ask.prompt,
            "max_tokens": ask.max_new_tokens,
            "temperature": ask.temperature,
            "seed": ask.seed,
            "ignore_eos": ask.ignore_eos,
            "stream": True,
            "stream_options": {"include_usage": True},
            # In full only where there is more to say: other servers than this one take a word, if that.
            "speculation": {"mode": ask.speculation, "sources": ask.sources} if ask.sources else ask.speculation,
            "per_request_spec_decode_metrics": "summary",
            **({} if isinstance(ask.prompt, str) or not ask.keeps_output else {"return_token_ids": True}),
        }


class _Reply:
    """Response of one request."""

    def __init__(self, ask: Ask, record: RequestRecord, begin_s: float) -> None:
        self._ask, self._record, self._begin_s = ask, record, begin_s
        self._rest = b""
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._is_done = False

    def take(self, part: bytes) -> None:
        """Some bytes of the body."""
        now_s = time.monotonic() - self._begin_s
        events, self._rest = server_sent_events(part, self._rest)
        for event in events:
            if event == b"[DONE]":
                self._is_done = True
            else:
                self._take_event(json.loads(event), now_s)

    def finish(self) -> None:
        """Raise if something is missing."""
        if not self._is_done:
            raise HttpError("the stream ended before [DONE]")
        if not self._record.output_tokens:
            raise HttpError("the stream says nothing of usage")

    def whole(self) -> Prompt:
        """The output, of the prompt's kind."""
        return "".join(self._texts) if isinstance(self._ask.prompt, str) else tuple(self._token_ids)

    def _take_event(self, event: Mapping[str, Any], now_s: float) -> None:
        record = self._record
        if "error" in event:
            raise HttpError(str(event["error"].get("message", event["error"])))
        for choice in event.get("choices") or ():
            text, token_ids = choice.get("text") or "", choice.get("token_ids") or ()
            # A chunk without text holds tokens that are no whole character yet, or only says why the output ended.
            if text or token_ids or choice.get("finish_reason") is None:
                record.chunk_s.append(now_s)
            if self._ask.keeps_output:
                self._texts.append(text)
                self._token_ids += token_ids
        if usage := event.get("usage"):
            record.prompt_tokens, record.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        if figures := (event.get("metrics") or {}).get("speculative_decoding"):
            _note_speculation(record, figures)


def _note_speculation(record: RequestRecord, figures: Mapping[str, Any]) -> None:
    """From vLLM's object of a request's speculation; its histogram counts the verifications that accepted exactly j."""
    record.verify_steps = figures.get("num_spec_steps") or 0
    record.drafted_tokens = figures.get("num_draft_tokens") or 0
    record.accepted_tokens = figures.get("num_accepted_draft_tokens") or 0
    histogram = figures.get("acceptance_histogram") or []
    record.accepted_per_position = list(accumulate(reversed(histogram)))[::-1][1:]
    while record.accepted_per_position and not record.accepted_per_position[-1]:
        record.accepted_per_position.pop()
    record.position_steps = sum(histogram)
