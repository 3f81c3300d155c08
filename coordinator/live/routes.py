"""The live page's paths: the page itself, which holds nothing, and what it asks for, under the door's own rules.

    GET  /live                        the page, and what it loads from /live/static/: open to whoever reaches the port
    GET  /live/api/sessions           what runs now, of the caller's own requests
    GET  /live/api/sessions/N/events  one session's tree from now on, as server-sent events
    POST /live/api/demo               a generation from an embedded prompt, and its tree, as server-sent events

A tree shows what people wrote and what was answered. With tokens each shows its owner's requests alone. Without,
whoever reaches the port sees all of them, as whoever reaches it may use the service; so that no other site can read
along in a browser that reaches it, requests have to come from the page itself, under an address and not any name.
"""

import asyncio
import contextlib
import importlib.resources
import ipaddress
import json
import random
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from outrider.coordinator.api.access import Caller
from outrider.coordinator.api.generations import Generations
from outrider.coordinator.api.http.fields import Fields, read_json_object
from outrider.coordinator.live.tap import pieces, record, watch
from outrider.coordinator.live.watcher import MAX_LINES, Watcher
from outrider.coordinator.sessions.messages import GenerationRequest
from outrider.coordinator.sessions.session import Session
from outrider.errors import Overloaded
from outrider.models import held_out_prompts
from outrider.sampling import MODE_NUMBERS, SpeculationMode
from outrider.v1 import generation_pb2

OPEN_PATHS = ("/live", "/live/static/")
MAX_WATCHERS, MAX_DEMOS = 64, 4
_RETRY_S = 2.0
# A connection that nobody reads is found out by writing to it.
_KEEP_ALIVE_S = 15.0
_MOST_BODY_BYTES = 64 << 10
_MOST_PROMPT_CHARACTERS = 8_000
_DEMO_TOKENS = (1, 128, 512)  # least, default, most
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


def live_routes(
    generations: Generations, sessions: Callable[[], Collection[Session]], *, hosts: Sequence[str] = ()
) -> list[BaseRoute]:
    """The page's routes, for the HTTP door; `OPEN_PATHS` need no token.

    Args:
        hosts: names under which the page may be asked for, besides addresses and localhost.
    """
    page = LivePage(generations, sessions, hosts=hosts)
    return [
        Route("/live", _static_file("index.html"), methods=["GET"]),
        *(Route(f"/live/static/{name}", _static_file(name), methods=["GET"]) for name in _static_names()),
        Route("/live/api/sessions", page.list_sessions, methods=["GET"]),
        Route("/live/api/sessions/{session_id:int}/events", page.watch_session, methods=["GET"]),
        Route("/live/api/demo", page.start_demo, methods=["POST"]),
    ]


class LivePage:
    """Handlers of the live page; see `live_routes`."""

    def __init__(
        self, generations: Generations, sessions: Callable[[], Collection[Session]], *, hosts: Sequence[str] = ()
    ) -> None:
        self._generations, self._sessions = generations, sessions
        self._hosts = frozenset(hosts)
        self._prompts = held_out_prompts()
        self._watchers = _Places(MAX_WATCHERS, "pages watch")
        self._demos = _Places(MAX_DEMOS, "demo sessions run")

    async def list_sessions(self, request: Request) -> Response:
        """The caller's sessions, the newest first."""
        caller = self._caller(request)
        found = [_session_dict(session) for session in self._own(caller)]
        content = json.dumps({"sessions": found[::-1], "prompts": len(self._prompts)})
        return Response(content, media_type="application/json", headers={**_HEADERS, "cache-control": "no-store"})

    async def watch_session(self, request: Request) -> Response:
        """One session's lines until it ends or the reader goes."""
        caller = self._caller(request)
        session_id = request.path_params["session_id"]
        session = next((own for own in self._own(caller) if own.session_id == session_id), None)
        if session is None:
            raise HTTPException(404, f"session {session_id} does not run, or is another caller's")
        async with contextlib.AsyncExitStack() as held:
            held.enter_context(self._watchers.taken())
            watcher = watch(session, pieces(self._generations.tokenizer), max_lines=MAX_LINES)
            held.callback(watcher.close)
            return _EventStream(_lines(watcher), held.pop_all())

    async def start_demo(self, request: Request) -> Response:
        """Start a generation and stream its tree; it ends with the connection."""
        caller = self._caller(request)
        body, _ = await read_json_object(request.scope, request.receive, most_bytes=_MOST_BODY_BYTES)
        asked = self._demo_request(body)
        async with contextlib.AsyncExitStack() as held:
            held.enter_context(self._watchers.taken())
            held.enter_context(self._demos.taken())
            events = await held.enter_async_context(contextlib.aclosing(self._generations.stream(asked, caller)))
            checked = await anext(events)
            assert isinstance(checked, GenerationRequest)
            watcher = record(self._generations, checked, caller)
            assert watcher is not None  # it has tokens to come
            held.callback(watcher.close)
            held.push_async_callback(_cancel, asyncio.create_task(_read_to_end(events), name="demo session"))
            return _EventStream(_lines(watcher), held.pop_all())

    def _caller(self, request: Request) -> Caller:
        caller: Caller = request.state.caller
        if request.headers.get("sec-fetch-site", "same-origin") not in {"same-origin", "none"}:
            raise HTTPException(403, "the live page's data is for the page itself, not for other sites")
        name = _host_name(request.headers.get("host", ""))
        if not caller.name and name != "localhost" and name not in self._hosts and not _is_address(name):
            raise HTTPException(403, f"open the page by its address instead of {name!r}, or give out tokens")
        return caller

    def _own(self, caller: Caller) -> list[Session]:
        return [
            session for session in self._sessions() if session.request.caller == caller.name and not session.is_finished
        ]

    def _demo_request(self, body: Mapping[str, Any]) -> generation_pb2.GenerateRequest:
        fields = Fields(body)
        number = fields.whole("prompt", low=0, high=len(self._prompts) - 1)
        least, usual, most = _DEMO_TOKENS
        tokens = fields.whole("max_new_tokens", low=least, high=most)
        temperature = fields.number("temperature") or 0.0
        text, mode = fields.text("text"), fields.one_of("speculation", tuple(SpeculationMode))
        if text is not None and not 0 < len(text) <= _MOST_PROMPT_CHARACTERS:
            fields.wrong("text", f"1 to {_MOST_PROMPT_CHARACTERS} characters needed")
        fields.refuse_others()
        fields.check()
        return generation_pb2.GenerateRequest(
            text=text or self._prompts[random.randrange(len(self._prompts)) if number is None else number],
            sampling_params=generation_pb2.SamplingParams(max_new_tokens=tokens or usual, temperature=temperature),
            speculation=generation_pb2.SpeculationParams(mode=MODE_NUMBERS[SpeculationMode(mode or "async")]),
        )


class _Places:
    """Limit of viewers, or of demo sessions, at a time."""

    def __init__(self, most: int, what: str) -> None:
        self._most, self._what = most, what
        self._taken = 0

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """One of them, while the block runs.

        Raises:
            Overloaded: none is left.
        """
        if self._taken >= self._most:
            raise Overloaded(f"{self._taken} {self._what} already", retry_after_s=_RETRY_S)
        self._taken += 1
        try:
            yield
        finally:
            self._taken -= 1


async def _lines(watcher: Watcher) -> AsyncGenerator[str, None]:
    while True:
        lines = await watcher.read(timeout_s=_KEEP_ALIVE_S)
        if lines:
            yield "".join(f"data: {line}\n\n" for line in lines)
        elif watcher.is_ended:
            return
        else:
            yield ": nothing new\n\n"


async def _read_to_end(events: AsyncGenerator[Any, None]) -> None:
    async for event in events:
        del event


async def _cancel(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _session_dict(session: Session) -> dict[str, Any]:
    return {
        "session_id": session.session_id,
        "request_id": session.request.request_id,
        "choice": session.index,
        "mode": session.mode.value,
        "prompt_tokens": session.prompt_length,
        "output_tokens": session.output_length,
        "verifications": session.verify_steps,
    }


def _host_name(host: str) -> str:
    """The name in a Host header; empty where it is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


# --------------------------------------------------------------------------------------------------------- responses


class _EventStream(StreamingResponse):
    """Lines as they come. What `held` holds is let go of in the end, be the reader gone before the first of them."""

    def __init__(self, lines: AsyncGenerator[str, None], held: contextlib.AsyncExitStack) -> None:
        headers = {**_HEADERS, "cache-control": "no-store"}
        super().__init__(lines, media_type="text/event-stream", headers=headers)
        self._lines, self._held = lines, held

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async with self._held, contextlib.aclosing(self._lines):
            await super().__call__(scope, receive, send)


def _static_names() -> list[str]:
    folder = importlib.resources.files("outrider.coordinator.live") / "static"
    return sorted(entry.name for entry in folder.iterdir() if entry.name.rpartition(".")[2] in _TYPES)


def _static_file(name: str) -> Callable[[Request], Any]:
    content = (importlib.resources.files("outrider.coordinator.live") / "static" / name).read_bytes()
    media_type = _TYPES[name.rpartition(".")[2]]

    async def serve(request: Request) -> Response:
        return Response(content, media_type=media_type, headers={**_HEADERS, "cache-control": "no-cache"})

    return serve
