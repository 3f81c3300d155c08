"""Authorisation of roles: which may call which service, from the certificate and before the first message.

TargetService, DraftService   coordinator
RegistryService               draft, target; each may register as what its certificate says, and nothing else
RegistryService/Reload        coordinator: whoever runs the service
PeerService                   coordinator
GenerationService             whoever has a token (coordinator/api/access.py)
VllmEngine                    the same: another door to the same generations
health, reflection            whoever could connect
"""

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

import grpc
import grpc.aio

from outrider.errors import Forbidden, OutriderError, Unauthenticated
from outrider.security.roles import Role, roles_of

_CALLERS: dict[str, frozenset[Role]] = {
    "outrider.v1.TargetService": frozenset({Role.COORDINATOR}),
    "outrider.v1.DraftService": frozenset({Role.COORDINATOR}),
    "outrider.v1.RegistryService": frozenset({Role.DRAFT, Role.TARGET}),
    "outrider.v1.PeerService": frozenset({Role.COORDINATOR}),
    "outrider.v1.RegistryService/Reload": frozenset({Role.COORDINATOR}),
}
_OPEN = frozenset(
    {
        "outrider.v1.GenerationService",
        "vllm.grpc.engine.VllmEngine",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }
)
KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
_MAKERS = {kind: getattr(grpc, f"{kind}_rpc_method_handler") for kind in KINDS}

Abort = Callable[[Any, OutriderError], Awaitable[Any]]


class RoleInterceptor(grpc.aio.ServerInterceptor):
    """Interceptor of servers with TLS: rejects calls that the caller's role may not make."""

    def __init__(self, abort: Abort) -> None:
        self._abort = abort

    async def intercept_service(self, continuation: Callable[..., Awaitable[Any]], handler_call_details: Any) -> Any:
        """The method's handler, guarded where its service is for certain roles."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method.strip("/")
        service = method.rpartition("/")[0]
        if handler is None or service in _OPEN:
            return handler
        # What is in neither list is for nobody.
        allowed = _CALLERS.get(method) or _CALLERS.get(service, frozenset())

        async def check(context: Any) -> None:
            try:
                check_caller(peer_roles(context), allowed, method)
            except OutriderError as error:
                await self._abort(context, error)

        return _guarded(handler, check)


def needs_role(method: str) -> bool:
    """Return True if `package.Service/Method` is restricted to certain roles."""
    return method in _CALLERS or method.rpartition("/")[0] in _CALLERS


def peer_roles(context: Any) -> frozenset[Role] | None:
    """The roles of the caller's certificate; None where it has shown none, or where there is no TLS."""
    properties = context.auth_context()
    if b"ssl" not in properties.get("transport_security_type", ()) or "x509_pem_cert" not in properties:
        return None
    return roles_of(name.decode("utf-8", errors="replace") for name in properties.get("peer_dns", ()))


def check_caller(roles: frozenset[Role] | None, allowed: Iterable[Role], what: str) -> None:
    """Check that a caller of these roles may use `what`.

    Raises:
        Unauthenticated: it has shown no certificate.
        Forbidden: its certificate is of another role.
    """
    needed = " or ".join(sorted(allowed)) or "nobody"
    if roles is None:
        raise Unauthenticated(f"{what} needs a certificate of {needed}: workers dial the coordinator's worker port")
    if not roles & set(allowed):
        found = ", ".join(sorted(roles)) or "no role"
        raise Forbidden(f"{what} is for {needed}, this certificate is of {found}")


def check_registration(context: Any, role: Role) -> None:
    """Raise Forbidden unless the caller may register as `role`; everybody may where there is no TLS."""
    roles = peer_roles(context)
    if roles is not None:
        check_caller(roles, {role}, f"registering as a {role}")


def _guarded(handler: Any, check: Callable[[Any], Awaitable[None]]) -> Any:
    kind = next(name for name in KINDS if getattr(handler, name) is not None)
    behaviour = getattr(handler, kind)

    async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
        await check(context)
        async for response in behaviour(request, context):
            yield response

    async def answer(request: Any, context: Any) -> Any:
        await check(context)
        return await behaviour(request, context)

    guarded = stream if inspect.isasyncgenfunction(behaviour) else answer
    return _MAKERS[kind](guarded, handler.request_deserializer, handler.response_serializer)
