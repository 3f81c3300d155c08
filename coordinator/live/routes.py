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
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Sequence
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from outrider.coordinator.access import Caller
from outrider.coordinator.generations import Generations
from outrider.coordinator.live.recording import pieces, record
from outrider.coordinator.live.tap import watch
from outrider.coordinator.live.watcher import MAX_LINES, Watcher
from outrider.coordinator.messages import GenerationRequest
from outrider.coordinator.session import Session
from outrider.errors import FieldViolation, InvalidRequest, Overloaded
from outrider.models import held_out_prompts
from outrider.v1 import common_pb2, generation_pb2

OPEN_PATHS = ("/live", "/live/static/")
MAX_WATCHERS, MAX_DEMOS = 64, 4
_RETRY_S = 2.0
# A connection that nobody reads is found out by writing to it.
_KEEP_ALIVE_S = 15.0
_MOST_BODY_BYTES = 64 << 10
_MOST_PROMPT_CHARACTERS = 8_000
_DEMO_TOKENS = (1, 128, 512)  # least, default, most
_TEMPERATURES = (0.0, 2.0)
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
_MODES = {
    "async": common_pb2.SPECULATION_MODE_ASYNC,
    "sync": common_pb2.SPECULATION_MODE_SYNC,
    "off": common_pb2.SPECULATION_MODE_OFF,
}


def live_routes(
    generations: Generations, sessions: Callable[[], Collection[Session]], *, hosts: Sequence[str] = ()
) -> list[BaseRoute]:
    """The page's routes, for the HTTP door; `OPEN_PATHS` need no token.

    Args:
        generations: the way to the scheduler, for demo sessions.
        sessions: those that run or wait now.
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
    """What the page asks for; see `live_routes`."""

    def __init__(
        self, generations: Generations, sessions: Callable[[], Collection[Session]], *, hosts: Sequence[str] = ()
    ) -> None:
        self._generations, self._sessions = generations, sessions
        self._hosts = frozenset(hosts)
        self._prompts = held_out_prompts()
        self._watchers = self._demos = 0

    async def list_sessions(self, request: Request) -> Response:
        """The caller's sessions, the newest first."""
        caller = self._caller(request)
        found = [_session_dict(session) for session in self._own(caller)]
        return _json({"sessions": found[::-1], "prompts": len(self._prompts)})

    async def watch_session(self, request: Request) -> Response:
        """One session's lines until it ends or the reader goes."""
        caller = self._caller(request)
        session_id = request.path_params["session_id"]
        session = next((own for own in self._own(caller) if own.session_id == session_id), None)
        if session is None:
            raise HTTPException(404, f"session {session_id} does not run, or is another caller's")
        self._check_room()
        watcher = watch(session, pieces(self._generations.tokenizer), max_lines=MAX_LINES)
        return _stream(self._lines(watcher))

    async def start_demo(self, request: Request) -> Response:
        """Starts a generation, and streams its tree; it ends with the connection."""
        caller = self._caller(request)
        asked = self._demo_request(await _json_body(request))
        self._check_room()
        if self._demos >= MAX_DEMOS:
            raise Overloaded(f"{self._demos} demo sessions run already", retry_after_s=_RETRY_S)
        events = self._generations.stream(asked, caller)
        checked = await anext(events)
        assert isinstance(checked, GenerationRequest)
        watcher = record(self._generations, checked, caller)
        assert watcher is not None  # it has tokens to come
        return _stream(self._demo_lines(watcher, events))

    def _caller(self, request: Request) -> Caller:
        caller: Caller = request.state.caller
        if request.headers.get("sec-fetch-site", "same-origin") not in {"same-origin", "none"}:
            raise HTTPException(403, "the live page's data is for the page itself, not for other sites")
        name = request.url.hostname or ""
        if not caller.name and name != "localhost" and name not in self._hosts and not _is_address(name):
            raise HTTPException(403, f"open the page by its address instead of {name!r}, or give out tokens")
        return caller

    def _own(self, caller: Caller) -> list[Session]:
        return [
            session for session in self._sessions() if session.request.caller == caller.name and not session.is_finished
        ]

    def _check_room(self) -> None:
        if self._watchers >= MAX_WATCHERS:
            raise Overloaded(f"{self._watchers} pages watch already", retry_after_s=_RETRY_S)

    async def _lines(self, watcher: Watcher) -> AsyncGenerator[str, None]:
        self._watchers += 1
        try:
            while True:
                lines = await watcher.read(timeout_s=_KEEP_ALIVE_S)
                if lines:
                    yield "".join(f"data: {line}\n\n" for line in lines)
                elif watcher.is_ended:
                    return
                else:
                    yield ": nothing new\n\n"
        finally:
            self._watchers -= 1
            watcher.close()

    async def _demo_lines(self, watcher: Watcher, events: Any) -> AsyncGenerator[str, None]:
        self._demos += 1
        reading = asyncio.create_task(_read_to_end(events), name="demo session")
        try:
            async with contextlib.aclosing(self._lines(watcher)) as lines:
                async for line in lines:
                    yield line
        finally:
            self._demos -= 1
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    def _demo_request(self, body: dict[str, Any]) -> generation_pb2.GenerateRequest:
        known = {"prompt", "text", "max_new_tokens", "temperature", "speculation", "max_nodes", "seed"}
        wrong = [FieldViolation(name, "not known") for name in sorted(body.keys() - known)]
        number = _number(body, "prompt", random.randrange(len(self._prompts)), (0, len(self._prompts) - 1), wrong)
        least, usual, most = _DEMO_TOKENS
        tokens = _number(body, "max_new_tokens", usual, (least, most), wrong)
        temperature = _number(body, "temperature", 0.0, _TEMPERATURES, wrong)
        text, mode = body.get("text"), body.get("speculation", "async")
        if text is not None and not (isinstance(text, str) and 0 < len(text) <= _MOST_PROMPT_CHARACTERS):
            wrong.append(FieldViolation("text", f"1 to {_MOST_PROMPT_CHARACTERS} characters needed"))
        if mode not in _MODES:
            wrong.append(FieldViolation("speculation", f"{mode!r} given, one of {', '.join(_MODES)} needed"))
        if wrong:
            raise InvalidRequest(wrong)
        return generation_pb2.GenerateRequest(
            text=text or self._prompts[int(number)],
            sampling_params=generation_pb2.SamplingParams(max_new_tokens=int(tokens), temperature=temperature),
            speculation=generation_pb2.SpeculationParams(mode=_MODES[mode]),
        )


async def _read_to_end(events: Any) -> None:
    async with contextlib.aclosing(events):
        async for event in events:
            del event


def _number(
    body: dict[str, Any], name: str, default: float, bounds: tuple[float, float], wrong: list[FieldViolation]
) -> float:
    value = body.get(name, default)
    least, most = bounds
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        wrong.append(FieldViolation(name, f"{value!r} given, {least:g} to {most:g} needed"))
        return default
    return value


async def _json_body(request: Request) -> dict[str, Any]:
    # Other sites may send forms and plain text without asking; JSON they may not.
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise HTTPException(415, "a body of content-type application/json is needed")
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > _MOST_BODY_BYTES:
            raise HTTPException(413, f"a body of at most {_MOST_BODY_BYTES} bytes is needed")
    try:
        value = json.loads(body or b"{}")
    except ValueError as error:
        raise InvalidRequest([FieldViolation("body", f"no JSON: {error}")]) from error
    if not isinstance(value, dict):
        raise InvalidRequest([FieldViolation("body", "a JSON object is needed")])
    return value


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


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


# --------------------------------------------------------------------------------------------------------- responses


def _stream(lines: AsyncIterator[str]) -> Response:
    return StreamingResponse(lines, media_type="text/event-stream", headers={**_HEADERS, "cache-control": "no-store"})


def _json(value: Any) -> Response:
    return Response(json.dumps(value), media_type="application/json", headers={**_HEADERS, "cache-control": "no-store"})


def _static_names() -> list[str]:
    folder = importlib.resources.files("outrider.coordinator.live") / "static"
    return sorted(entry.name for entry in folder.iterdir() if entry.name.rpartition(".")[2] in _TYPES)


def _static_file(name: str) -> Callable[[Request], Any]:
    content = (importlib.resources.files("outrider.coordinator.live") / "static" / name).read_bytes()
    media_type = _TYPES[name.rpartition(".")[2]]

    async def serve(request: Request) -> Response:
        return Response(content, media_type=media_type, headers={**_HEADERS, "cache-control": "no-cache"})

    return serve
