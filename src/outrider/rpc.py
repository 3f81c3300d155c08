"""gRPC servers and channels as all roles use them: options, health, reflection, errors to status codes (torch-free)."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio  # pyright: ignore[reportAttributeAccessIssue] - bound at run time
from grpc_reflection.v1alpha import reflection
from grpc_status import rpc_status

from outrider import errors
from outrider.roles.ports import check_free
from outrider.security.callers import RoleInterceptor
from outrider.security.roles import Role
from outrider.security.tls import TlsConfig

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 64 << 20
# Clients take 8 KiB of metadata by default. Violations appear in the message and in the details, so all of them get
# less than a message alone, and each has a bound of its own.
_MOST_MESSAGE_BYTES, _MOST_VIOLATIONS_BYTES = 2_400, 2_100
# Of one violation. Together they are below the bound of all, so that the first violation always fits.
_MOST_FIELD_BYTES, _MOST_DESCRIPTION_BYTES = 300, 1_500
# Of a character that a message carries escaped.
_ESCAPED_BYTES = 12
MAX_CONNECTIONS = 1_024
MAX_METADATA_BYTES = 8 << 10
# Longer than any role drains: what runs is ended by the stop that follows.
_DRAIN_S = 3_600.0

_SHARED_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # A peer that is cut off or frozen is noticed in 12 s at most; without ping_timeout_ms it takes a minute.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 2_000),
    ("grpc.http2.ping_timeout_ms", 2_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]

# so_reuseport is on by default: a second server would bind the same port in silence.
SERVER_OPTIONS = [
    *_SHARED_OPTIONS,
    ("grpc.so_reuseport", 0),
    # Below it a peer's pings count as an attack: the default is five minutes, and then an idle stream ends after 40 s.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    # Of one address: each costs a file and some memory before it has shown a certificate or a token.
    ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
    # Further calls of a connection wait at their client.
    ("grpc.max_concurrent_streams", 1_024),
    # Calls that have come and are not taken up yet: gRPC cancels some beyond the first number, all beyond the second,
    # by default 1,000 and 3,000. Whom there is no room for is to hear it from the service, with a time to come back.
    ("grpc.server.max_pending_requests", 16_384),
    ("grpc.server.max_pending_requests_hard_limit", 32_768),
    # The first is where gRPC begins to refuse at random, the second where it always does.
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
    # A peer that connects and then says nothing; the default is two minutes.
    ("grpc.server_handshake_timeout_ms", 10_000),
    # A connection without calls is closed; clients dial anew when they need it.
    ("grpc.max_connection_idle_ms", 600_000),
]
CHANNEL_OPTIONS = [*_SHARED_OPTIONS, ("grpc.enable_retries", 0)]

CODES: dict[type[errors.OutriderError], grpc.StatusCode] = {
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.OutOfSlots: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.CommitMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.WorkerUnavailable: grpc.StatusCode.UNAVAILABLE,
    errors.WorkerRefused: grpc.StatusCode.FAILED_PRECONDITION,
    errors.CheckpointError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.CorpusError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.MissingPackage: grpc.StatusCode.FAILED_PRECONDITION,
    errors.GrammarUnsupported: grpc.StatusCode.FAILED_PRECONDITION,
    errors.LoadtestFailed: grpc.StatusCode.FAILED_PRECONDITION,
    errors.Superseded: grpc.StatusCode.ABORTED,
    errors.InternalError: grpc.StatusCode.INTERNAL,
    errors.CertificateError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.TokenFileError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.Forbidden: grpc.StatusCode.PERMISSION_DENIED,
}


def unread_options(most: int) -> list[tuple[str, int]]:
    """Return channel options that bound a stream's unread bytes; gRPC's default grows to megabytes."""
    return [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", most)]


def open_channel(
    address: str, *, tls: TlsConfig | None = None, peer: Role | None = None, unread_bytes: int | None = None
) -> grpc.aio.Channel:
    """A channel to `host:port` with this project's options.

    Args:
        tls: own proof and whom to believe; None talks in the clear.
        peer: with TLS, the role that has to answer, whatever its address; None needs the host among its names.
        unread_bytes: what a stream may be sent beyond what was read of it, about; None: megabytes.

    Raises:
        CertificateError: a file of `tls` cannot be read.
    """
    window = [] if unread_bytes is None else unread_options(unread_bytes)
    if tls is None:
        return grpc.aio.insecure_channel(address, options=[*CHANNEL_OPTIONS, *window])
    role = [] if peer is None else [("grpc.ssl_target_name_override", peer.dns_name)]
    return grpc.aio.secure_channel(address, tls.channel_credentials(), options=[*CHANNEL_OPTIONS, *role, *window])


def add_methods(
    server: grpc.aio.Server, service: str, handlers: Mapping[str, "grpc.RpcMethodHandler[Any, Any]"]
) -> None:
    """Add a service's methods to a server that has not started.

    grpc.aio queues calls by registered method, and all others in one queue, from which it takes one call at a time:
    there a burst of streams would delay every unary call behind it.
    """
    register = server.add_registered_method_handlers  # pyright: ignore[reportAttributeAccessIssue] - the stubs lack it
    register(service, handlers)


def _fitting(message: str, most: int = _MOST_MESSAGE_BYTES) -> str:
    """Cut a message to the bytes that trailing metadata hold, where it appears twice."""
    size = 0
    for place, char in enumerate(message):
        size += _size(char)
        if size > most:
            return f"{message[:place]} ..."
    return message


def _size(text: str) -> int:
    return sum(1 if " " <= char <= "~" and char != "%" else _ESCAPED_BYTES for char in text)


def _fitting_violations(violations: Sequence[errors.FieldViolation]) -> list[errors.FieldViolation]:
    """Return as many as trailing metadata hold, one at least, and behind them how many more there are.

    Names and descriptions are cut where they are long: a worker's text, or a client's, may be of any length.
    """
    size, kept = 0, []
    for violation in violations:
        field = _fitting(violation.field, _MOST_FIELD_BYTES)
        description = _fitting(violation.description, _MOST_DESCRIPTION_BYTES)
        size += _size(field) + _size(description) + 4
        if size > _MOST_VIOLATIONS_BYTES:
            rest = len(violations) - len(kept)
            wrong = "1 more field is wrong" if rest == 1 else f"{rest} more fields are wrong"
            return [*kept, errors.FieldViolation("request", f"{wrong}: correct these first")]
        kept.append(errors.FieldViolation(field, description))
    return kept


def status_of(error: errors.OutriderError) -> status_pb2.Status:
    """The rich status of an error: its code, its message, and details that programs can read."""
    code = next(code for kind, code in CODES.items() if isinstance(error, kind))
    if isinstance(error, errors.InvalidRequest):
        error = errors.InvalidRequest(_fitting_violations(error.violations))
    status = status_pb2.Status(code=code.value[0], message=_fitting(str(error)))
    detail = any_pb2.Any()
    if isinstance(error, errors.InvalidRequest):
        violations = [
            error_details_pb2.BadRequest.FieldViolation(field=violation.field, description=violation.description)
            for violation in error.violations
        ]
        detail.Pack(error_details_pb2.BadRequest(field_violations=violations))
        status.details.append(detail)
    elif isinstance(error, errors.Overloaded):
        delay = duration_pb2.Duration(nanos=int(error.retry_after_s % 1 * 1e9), seconds=int(error.retry_after_s))
        detail.Pack(error_details_pb2.RetryInfo(retry_delay=delay))
        status.details.append(detail)
    return status


async def abort_with(context: grpc.aio.ServicerContext[Any, Any], error: errors.OutriderError) -> NoReturn:
    """End a call with the status of `error`."""
    await abort_with_status(context, status_of(error))


async def abort_with_status(context: grpc.aio.ServicerContext[Any, Any], status: status_pb2.Status) -> NoReturn:
    """End a call with a status and its details."""
    # The stubs of grpc.aio lack this method.
    await context.abort_with_status(rpc_status.to_status(status))  # pyright: ignore[reportAttributeAccessIssue] - as said
    raise AssertionError("abort_with_status does not return")


class _Health(health_aio.HealthServicer):
    """gRPC's own servicer, which lacks List, and does not say why Check finds nothing.

    Source: https://github.com/grpc/grpc-proto/blob/master/grpc/health/v1/health.proto
    """

    def __init__(self) -> None:
        super().__init__()
        self._statuses: dict[str, health_pb2.HealthCheckResponse.ServingStatus] = {}

    async def set(self, service: str, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        """Set a service's status; those who watch it hear of it."""
        self._statuses[service] = status
        await super().set(service, status)

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802 - gRPC's name
        """Return a service's status; NOT_FOUND for one that is not served here."""
        status = self._statuses.get(request.service)
        if status is None:
            served = ", ".join(name for name in self._statuses if name)
            advice = f"served here: {served}; leave the name empty to ask for the whole server"
            await context.abort(grpc.StatusCode.NOT_FOUND, _fitting(f"{advice}; not served: {request.service}"))
        return health_pb2.HealthCheckResponse(status=status)

    async def List(self, request: Any, context: Any) -> Any:  # noqa: N802 - gRPC's
        """Return the status of every service, the whole server's under the empty name."""
        statuses = {name: health_pb2.HealthCheckResponse(status=status) for name, status in self._statuses.items()}
        return health_pb2.HealthListResponse(  # pyright: ignore[reportAttributeAccessIssue] - not in its stubs
            statuses=statuses
        )


class RoleServer:
    """A gRPC server of one role, with health and reflection beside its own services.

    Args:
        services: full names ("outrider.v1.TargetService"), for health and reflection.
        address: host:port to bind; port 0 takes a free one. With TLS, who dials it needs a certificate, and each
            service takes the roles that it is for.
        public_address: a second one, where nobody needs a certificate; what is for certain roles is refused there.
        shared_address: a third, likewise, on which other processes of this machine and user listen, too: the kernel
            spreads connections over them. As long as `stop` drains, new ones go to the others.
        tls: None serves in the clear.
        max_request_bytes: of one message; a larger one ends its call with RESOURCE_EXHAUSTED, unread.
        interceptors: of calls, before the check of roles.

    Raises:
        OSError: an address cannot be bound.
        CertificateError: a file of `tls` cannot be used.
    """

    def __init__(
        self,
        *,
        services: Sequence[str],
        add_services: Callable[[grpc.aio.Server], None],
        address: str,
        public_address: str | None = None,
        shared_address: str | None = None,
        tls: TlsConfig | None = None,
        max_request_bytes: int = MAX_MESSAGE_BYTES,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    ) -> None:
        self._services = list(services)
        roles = [] if tls is None else [RoleInterceptor(abort_with)]
        # Of an option that is given twice, gRPC takes the first.
        options = dict(SERVER_OPTIONS) | {"grpc.max_receive_message_length": max_request_bytes}
        self._is_shared = shared_address is not None
        options["grpc.so_reuseport"] = int(self._is_shared)
        self._server = grpc.aio.server(options=list(options.items()), interceptors=[*interceptors, *roles])
        self._health = _Health()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = [*services, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME]
        reflection.enable_server_reflection(names, self._server)
        add_services(self._server)
        self.address = self._listen(address, tls, client_certificates=True)
        """host:port with the port that was bound."""
        self.public_address = self.address
        """Address of the second listener, if there is one."""
        if public_address is not None:
            self.public_address = self._listen(public_address, tls, client_certificates=False)
        self._addresses = dict.fromkeys((self.address, self.public_address))
        if shared_address is not None:
            self._addresses[shared_address] = None
            self._listen(shared_address, tls, client_certificates=False, is_shared=True)

    @property
    def port(self) -> int:
        """Port of `address`."""
        return int(self.address.rpartition(":")[2])

    def _listen(
        self, address: str, tls: TlsConfig | None, *, client_certificates: bool, is_shared: bool = False
    ) -> str:
        try:
            if self._is_shared and not is_shared:
                # gRPC shares all ports of a server or none: one that is taken would be bound in silence.
                check_free(address)
            if tls is None:
                port = self._server.add_insecure_port(address)
            else:
                credentials = tls.server_credentials(client_certificates=client_certificates)
                port = self._server.add_secure_port(address, credentials)
        except (RuntimeError, OSError) as error:
            raise OSError(f"cannot listen on {address}: is the port taken? Choose another one") from error
        return f"{address.rpartition(':')[0]}:{port}"

    async def start(self) -> None:
        """Start to serve, health SERVING."""
        # Before anybody can ask: a service without a status is one that is not served here.
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)
        await self._server.start()
        logger.info("serving %s on %s", ", ".join(self._services), " and ".join(self._addresses))

    async def stop(self, *, grace_s: float = 1.0, drain: Callable[[], Awaitable[None]] | None = None) -> None:
        """Health NOT_SERVING, then the drain, then the listener closes; calls still open get `grace_s`."""
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        # Its clients dial anew, and the kernel leads them to the others; calls that run go on.
        closing = asyncio.create_task(self._server.stop(_DRAIN_S)) if self._is_shared else None
        if drain is not None:
            await drain()
        await self._server.stop(grace_s)
        if closing is not None:
            await closing

    async def _set_health(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for name in ("", *self._services):
            await self._health.set(name, status)
