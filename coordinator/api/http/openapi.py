"""/openapi.json: every path of the HTTP door, and the fields of requests as those who read them know them."""

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.routing import BaseRoute, Route

from outrider import __version__
from outrider.coordinator.api.http.openai import Endpoint

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
    described: dict[str, Any] = {"responses": {"200": {"description": "As asked for."}, "4XX": _refusal()}}
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


def _refusal() -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {"description": "Refused, with the reason.", "content": content}
