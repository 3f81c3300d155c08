"""The HTTP door as one ASGI application: who may come in, which paths there are, and errors in one shape."""

import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from outrider import __version__
from outrider.coordinator.api.access import Access
from outrider.coordinator.api.http import errors
from outrider.coordinator.api.http.chat_template import ChatTemplate, NoChatTemplate
from outrider.coordinator.api.http.errors import error_response, json_response
from outrider.coordinator.api.http.openai import REQUEST_ID_HEADER, Endpoint, header_id, openai_routes
from outrider.coordinator.api.http.tokenizing import tokenizer_routes
from outrider.coordinator.api.service import GenerationServicer
from outrider.errors import OutriderError, Unauthenticated

HEALTH, PING = "/health", "/ping"
_SCHEME = b"bearer "

AsgiApp = Callable[[Any, Any, Any], Awaitable[None]]


_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


_REFUSAL = {
    "description": "Refused, with the reason.",
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
}


def describe_routes(routes: Sequence[BaseRoute]) -> dict[str, Any]:
    """Return the OpenAPI description of the routes."""
    paths = {route.path: _path(route) for route in routes if isinstance(route, Route) and route.methods}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Outrider", "version": __version__},
        "paths": {path.replace(":path}", "}"): described for path, described in paths.items()},
        "components": {"schemas": {"Error": _ERROR}},
    }


def _path(route: Route) -> Mapping[str, Any]:
    described: dict[str, Any] = {"responses": {"200": {"description": "As asked for."}, "4XX": _REFUSAL}}
    if isinstance(route.endpoint, Endpoint):
        content = {"application/json": {"schema": route.endpoint.schema()}}
        described["requestBody"] = {"required": True, "content": content}
        described["responses"]["200"]["content"] = {"application/json": {}, "text/event-stream": {}}
    if route.param_convertors:
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in route.param_convertors
        ]
    return {method.lower(): described for method in sorted(route.methods or ()) if method != "HEAD"}


def create_app(
    service: GenerationServicer,
    *,
    template: ChatTemplate | NoChatTemplate | None = None,
    tokenizer_config: Mapping[str, Any] | None = None,
    cors: Sequence[str] = (),
    is_serving: Callable[[], bool] = lambda: True,
    extra_routes: Sequence[BaseRoute] = (),
    open_paths: Collection[str] = (),
) -> AsgiApp:
    """The application.

    Args:
        cors: origins whose pages may send requests; `*` is every one.
        open_paths: that need no token where the coordinator asks for one; what ends with / stands for all below it.
    """
    template = template or NoChatTemplate("this model has no chat template")
    health = _health_route(is_serving)
    routes = [
        Route(HEALTH, health, methods=["GET"]),
        Route(PING, health, methods=["GET", "POST"]),
        Route("/version", _version, methods=["GET"]),
        *model_routes(service),
        *openai_routes(service.generations, template),
        *tokenizer_routes(service.generations, template, tokenizer_config or {}),
        *extra_routes,
    ]
    description = describe_routes(routes)

    async def openapi(request: Request) -> Response:
        return json_response(description)

    routes.append(Route("/openapi.json", openapi, methods=["GET"]))
    app = Starlette(
        routes=routes,
        exception_handlers={
            HTTPException: errors.on_http_exception,
            OutriderError: errors.on_outrider_error,
            Exception: errors.on_defect,
        },
    )
    guarded = _RequestIds(_TokenGuard(app, service.access, {HEALTH, PING, *open_paths}))
    if not cors:
        return guarded
    # A browser asks first, without a token.
    return CORSMiddleware(
        guarded, cors, allow_methods=["GET", "POST"], allow_headers=["*"], expose_headers=[REQUEST_ID_HEADER]
    )


class _RequestIds:
    """Puts the request's id into every response: the one that it came with, or a new one."""

    def __init__(self, app: AsgiApp) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        request_id = header_id(scope) or uuid.uuid4().hex

        async def send_with_id(message: Any) -> None:
            if message["type"] == "http.response.start":
                headers = [*message.get("headers", ()), (REQUEST_ID_HEADER.encode(), request_id.encode())]
                message = {**message, "headers": headers}
            await send(message)

        await self._app(scope, receive, send_with_id)


class _TokenGuard:
    """Lets nobody in without a good token, before anything of the request's body is read.

    The caller is then `request.state.caller`.
    """

    def __init__(self, app: AsgiApp, access: Access, open_paths: Collection[str]) -> None:
        self._app, self._access = app, access
        self._open_paths = frozenset(path for path in open_paths if not path.endswith("/"))
        self._open_folders = tuple(path for path in open_paths if path.endswith("/"))

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and not self._is_open(scope["path"]):
            try:
                scope.setdefault("state", {})["caller"] = self._access.caller_with(bearer_token(scope["headers"]))
            except Unauthenticated as error:
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _is_open(self, path: str) -> bool:
        return path in self._open_paths or (bool(self._open_folders) and path.startswith(self._open_folders))


def bearer_token(headers: Sequence[tuple[bytes, bytes]]) -> str | None:
    """The token in a request's headers; None where there is none, or more than one."""
    values = [value for name, value in headers if name == b"authorization"]
    if len(values) != 1 or values[0][: len(_SCHEME)].lower() != _SCHEME:
        return None
    return values[0][len(_SCHEME) :].decode("latin-1").strip()


def _health_route(is_serving: Callable[[], bool]) -> Callable[[Request], Awaitable[Response]]:
    async def health(request: Request) -> Response:
        """Answer 200 while this server takes requests, else 503, as the gRPC health service does."""
        if is_serving():
            return json_response({"status": "serving"})
        return json_response({"status": "draining"}, status=503)

    return health


async def _version(request: Request) -> Response:
    return json_response({"version": __version__})


def model_routes(service: GenerationServicer) -> list[BaseRoute]:
    """/v1/models: the one that is served, by each of its names."""
    created = int(time.time())

    def cards() -> dict[str, dict[str, Any]]:
        generations = service.generations
        return {name: card(name) for name in (generations.model.name, *generations.other_names)}

    def card(name: str) -> dict[str, Any]:
        model = service.generations.model
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "outrider",
            "root": model.name,
            "parent": None,
            "max_model_len": model.max_model_len,
        }

    async def listing(request: Request) -> Response:
        return json_response({"object": "list", "data": [*cards().values()]})

    async def one(request: Request) -> Response:
        known, name = cards(), request.path_params["model"]
        if name not in known:
            raise errors.UnknownModel(name, next(iter(known)))
        return json_response(known[name])

    return [
        Route("/v1/models", listing, methods=["GET"]),
        Route("/v1/models/{model:path}", one, methods=["GET"]),
    ]
