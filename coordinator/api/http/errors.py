"""Every error as the HTTP door says it: OpenAI's shape, and the status that clients act upon.

{"error": {"message": "...", "type": "invalid_request_error", "param": "temperature", "code": null}}
"""

import json
import math
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from outrider import errors

_CODES_OF_STATUS = {
    404: "not_found",
    405: "method_not_allowed",
    413: "request_too_large",
    415: "unsupported_media_type",
}


class UnknownModel(errors.InvalidRequest):
    """The request names a model that is not served here."""

    def __init__(self, given: str, served: str) -> None:
        super().__init__([errors.FieldViolation("model", f"{given!r} is not served here: use {served!r}")])


class RequestTooLarge(errors.InvalidRequest):
    """The body is larger than any request that could be right."""

    def __init__(self, description: str) -> None:
        super().__init__([errors.FieldViolation("body", description)])


class UnsupportedMediaType(errors.InvalidRequest):
    """The body is not declared as JSON."""

    def __init__(self, description: str) -> None:
        super().__init__([errors.FieldViolation("content-type", description)])


# By kind, the nearest one first: status, type, code.
_KINDS: dict[type[errors.OutriderError], tuple[int, str, str | None]] = {
    UnknownModel: (404, "invalid_request_error", "model_not_found"),
    RequestTooLarge: (413, "invalid_request_error", "request_too_large"),
    UnsupportedMediaType: (415, "invalid_request_error", "unsupported_media_type"),
    errors.InvalidRequest: (400, "invalid_request_error", None),
    errors.Unauthenticated: (401, "authentication_error", "invalid_api_key"),
    errors.Forbidden: (403, "permission_error", None),
    errors.Superseded: (409, "conflict_error", "superseded"),
    errors.Overloaded: (429, "rate_limit_error", "overloaded"),
    errors.OutOfSlots: (429, "rate_limit_error", "overloaded"),
    errors.WorkerUnavailable: (503, "service_unavailable_error", "worker_unavailable"),
    errors.OutriderError: (500, "server_error", None),
}


def error_body(error: errors.OutriderError) -> dict[str, Any]:
    """The error as JSON."""
    _, kind, code = _kind(error)
    param = None
    if isinstance(error, errors.InvalidRequest) and error.violations:
        param, code = error.violations[0].field, code or error.violations[0].code or None
    return {"error": {"message": str(error), "type": kind, "param": param, "code": code}}


def error_response(error: errors.OutriderError) -> Response:
    """A whole response."""
    headers = {}
    if isinstance(error, errors.Overloaded):
        # Whole seconds is all that the header knows; clients that read the second one need not wait as long.
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
        headers["retry-after-ms"] = str(math.ceil(error.retry_after_s * 1e3))
    if isinstance(error, errors.Unauthenticated):
        headers["www-authenticate"] = "Bearer"
    return json_response(error_body(error), status=_kind(error)[0], headers=headers)


def json_response(content: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A response of JSON."""
    body = json.dumps(content, separators=(",", ":")).encode("ascii")
    return Response(body, status, dict(headers or {}), media_type="application/json")


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Convert starlette's own refusals: unknown paths and methods."""
    assert isinstance(error, HTTPException)
    status = error.status_code
    message = f"{error.detail}: {request.method} {request.url.path}"
    content = {"message": message, "type": "invalid_request_error", "param": None, "code": _CODES_OF_STATUS.get(status)}
    return json_response({"error": content}, status=status, headers=error.headers)


async def on_outrider_error(request: Request, error: Exception) -> Response:
    """An error that a route did not catch itself."""
    assert isinstance(error, errors.OutriderError)
    return error_response(error)


async def on_defect(request: Request, error: Exception) -> Response:
    """A defect of ours; what it was is in the log, and nothing of it is told."""
    return error_response(errors.InternalError("a defect of the server ended this request; its log says more"))


def _kind(error: errors.OutriderError) -> tuple[int, str, str | None]:
    return next(outcome for kind, outcome in _KINDS.items() if isinstance(error, kind))
