"""The client's half of bearer tokens: every call carries `authorization: Bearer TOKEN`."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from outrider.errors import FieldViolation, InvalidRequest
from outrider.security.binding import is_loopback
from outrider.security.tls import TlsConfig

HEADER = "authorization"
SCHEME = "Bearer "

_Stub = TypeVar("_Stub")


def authorized(stub: _Stub, token: str | None) -> _Stub:
    """The stub, each of whose methods sends the token from now on."""
    if token is not None:
        for name, method in list(vars(stub).items()):
            setattr(stub, name, functools.partial(_send, method, (HEADER, f"{SCHEME}{token}")))
    return stub


def _send(method: Callable[..., Any], header: tuple[str, str], *arguments: Any, **options: Any) -> Any:
    return method(*arguments, **options | {"metadata": (header, *(options.get("metadata") or ()))})


def check_transport(endpoint: str, *, tls: TlsConfig | None, token: str | None, insecure: bool) -> None:
    """Refuse to send a token where others may read it.

    Raises:
        InvalidRequest: without TLS, and the endpoint is not on this machine; or it can be no token.
    """
    if token is not None and tls is None and not insecure and not is_loopback(endpoint.rpartition(":")[0]):
        fault = f"it would cross the network to {endpoint} unencrypted: give tls (--tls-ca) as well"
        raise InvalidRequest([FieldViolation("token", fault)])
    if token is not None and not (token.isascii() and token.isprintable() and token):
        raise InvalidRequest([FieldViolation("token", "printable ASCII characters needed")])
