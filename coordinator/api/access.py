"""Access to the public API: tokens, and per token limits of requests, concurrent choices and output tokens.

    level(t) = min(limit, level(t') + limit / 60 s * (t - t'))     of requests and of output tokens, full at first

A request takes one from the first and needs a positive level of the second, from which output tokens are taken as they
are emitted. What was begun is never cut: the level falls below zero then, and new requests wait until it is made up
for. All of it is counted in this process alone: with k coordinators a token has k times as much.
"""

import contextlib
import logging
import math
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from outrider.coordinator.sessions.clock import now_ns
from outrider.errors import FieldViolation, InvalidRequest, OutriderError, Overloaded, Unauthenticated
from outrider.rpc import abort_with
from outrider.security.bearer import HEADER, SCHEME
from outrider.security.callers import KINDS, needs_role, peer_roles
from outrider.security.roles import Role
from outrider.security.tokens import TokenEntry, TokenFile, find

logger = logging.getLogger(__name__)

# Without Watch, whose streams would stay.
_HEALTH_CHECK = "grpc.health.v1.Health/Check"
# Of the file: often enough for whoever takes a token back, seldom enough for a slow disk.
_REFRESH_NS = 500_000_000
_MINUTE_S = 60.0
MAX_WATCHES = 16
_PLACE_RETRY_S = 1.0


class _Level:
    """The rest of a limit a minute; None is no limit."""

    def __init__(self, per_minute: int | None) -> None:
        self._limit = self._level = math.inf if per_minute is None else float(per_minute)
        self._then_ns = now_ns()

    def wait_s(self) -> float:
        """Time until one may be taken; 0 for now."""
        now = now_ns()
        gained = self._limit / _MINUTE_S * (now - self._then_ns) / 1e9
        self._level, self._then_ns = min(self._limit, self._level + gained), now
        return 0.0 if self._level >= 1 else (1 - self._level) * _MINUTE_S / self._limit

    def take(self, amount: float) -> None:
        """Take an amount, even below zero."""
        self._level -= amount


class Caller:
    """One token's user, with what it has used of its limits.

    Attributes:
        name: of the token; empty for everybody where no tokens are asked for.
        places: by request id, the choices of each of its streams: while one is taken over there are two.
    """

    def __init__(
        self, entry: TokenEntry | None = None, *, name: str = "", places: dict[str, list[int]] | None = None
    ) -> None:
        self.entry = entry
        self.name = entry.name if entry is not None else name
        self._requests = _Level(entry and entry.requests_per_minute)
        self._tokens = _Level(entry and entry.tokens_per_minute)
        self._max_concurrent = entry.max_concurrent if entry is not None else None
        self.places = {} if places is None else places
        self._watches = 0

    @contextlib.contextmanager
    def admitted(self, request_id: str, choices: int) -> Iterator[None]:
        """Hold the places of a request while it lasts; one that takes over another of its id shares its places.

        Raises:
            Overloaded: a limit is reached; nothing was taken.
        """
        self._check(request_id, choices)
        self._requests.take(1)
        self.places.setdefault(request_id, []).append(choices)
        try:
            yield
        finally:
            # What it leaves may be the stream that it could not take over.
            self.places[request_id].remove(choices)
            if not self.places[request_id]:
                del self.places[request_id]

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Counts a stream of server information while it lasts; they cost the server work, and no quota bounds them.

        Raises:
            Overloaded: this token has as many as it may.
        """
        if self.entry is not None and self._watches >= MAX_WATCHES:
            raise Overloaded(f"{self.name} watches {self._watches} times already", retry_after_s=_PLACE_RETRY_S)
        self._watches += 1
        try:
            yield
        finally:
            self._watches -= 1

    def note_output(self, tokens: int) -> None:
        """Count emitted output tokens."""
        self._tokens.take(tokens)

    def _check(self, request_id: str, choices: int) -> None:
        for what, level in (("requests", self._requests), ("output tokens", self._tokens)):
            if wait_s := level.wait_s():
                raise Overloaded(
                    f"{self.name} has used its {what} of a minute: come back in {wait_s:.1f} s", retry_after_s=wait_s
                )
        if self._max_concurrent is None:
            return
        held = sum(max(streams) for other, streams in self.places.items() if other != request_id)
        if held + choices > self._max_concurrent:
            raise Overloaded(
                f"{self.name} has {held} choices running, and asks for {choices} more: at most "
                f"{self._max_concurrent} at a time",
                retry_after_s=_PLACE_RETRY_S,
            )


class Access:
    """The callers of the public door.

    Raises:
        OSError: the file cannot be read.
        TokenFileError: it is no token file.
    """

    def __init__(self, token_file: Path | None = None) -> None:
        self._file = None if token_file is None else TokenFile(token_file)
        self._refreshed_ns = now_ns()
        self._callers: dict[str, Caller] = {}
        self._everybody = Caller()
        # Whoever has a coordinator's certificate runs this service. No token has a name like this one.
        self._operator = Caller(name=":operator")
        self.unauthenticated = 0
        """Calls without a good token."""
        if self._file is not None and not self._file.entries:
            logger.warning("%s holds no token: nobody may call (outrider token new makes one)", token_file)

    def caller(self, context: Any) -> Caller:
        """Return the caller of a call.

        Raises:
            Unauthenticated: it shows no token, or one that is not known.
        """
        if self._file is None:
            return self._everybody
        token = bearer_token(context.invocation_metadata())
        if token is None:
            if Role.COORDINATOR in (peer_roles(context) or ()):
                return self._operator
            raise self._stranger("this service needs a token: send the metadata `authorization: Bearer TOKEN`")
        return self.caller_with(token)

    def caller_with(self, token: str | None) -> Caller:
        """Return the caller with this token; the anonymous one if no tokens are configured.

        Raises:
            Unauthenticated: it is missing, or not known.
        """
        if self._file is None:
            return self._everybody
        if token is None:
            raise self._stranger("this service needs a token: send the header `Authorization: Bearer TOKEN`")
        entry = self._entry(token)
        if entry is None:
            raise self._stranger("this token is not known: ask whoever runs the service for one")
        known = self._callers.get(entry.name)
        if known is not None and known.entry == entry:
            return known
        # Where its limits have changed, its requests go on.
        caller = self._callers[entry.name] = Caller(entry, places=known and known.places)
        return caller

    def _stranger(self, advice: str) -> Unauthenticated:
        self.unauthenticated += 1
        return Unauthenticated(advice)

    def knows_token(self, metadata: Any) -> bool:
        """Return True if a call's metadata has a valid token."""
        token = bearer_token(metadata)
        return token is not None and self._entry(token) is not None

    def _entry(self, token: str) -> TokenEntry | None:
        assert self._file is not None
        self._refresh()
        return find(token, self._file.entries)

    def _refresh(self) -> None:
        assert self._file is not None
        now = now_ns()
        if now - self._refreshed_ns < _REFRESH_NS:
            return
        self._refreshed_ns = now
        fault = self._file.refresh()
        if fault is not None:
            logger.error("the token file is not read anew, what it said before holds on: %s", fault)
        names = {entry.name for entry in self._file.entries}
        for name in self._callers.keys() - names:
            del self._callers[name]


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Ends calls without a good token before their message is read; a health check and what is for roles need none."""

    def __init__(self, access: Access) -> None:
        self._access = access

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """The method's handler, or one that refuses."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method.strip("/")
        if handler is None or method == _HEALTH_CHECK or needs_role(method):
            return handler
        if self._access.knows_token(handler_call_details.invocation_metadata):
            return handler
        return self._for_operator(handler)

    def _for_operator(self, handler: Any) -> Any:
        """The handler for calls without a token: streaming, as gRPC reads a single message before it asks."""

        async def serve(requests: AsyncIterator[Any], context: Any) -> None:
            try:
                self._access.caller(context)
            except OutriderError as error:
                await abort_with(context, error)
            request = requests if handler.request_streaming else await anext(requests, None)
            if request is None:
                await abort_with(context, InvalidRequest([FieldViolation("request", "missing: send one message")]))
            behaviour = next(filter(None, (getattr(handler, kind) for kind in KINDS)))
            if not handler.response_streaming:
                await context.write(await behaviour(request, context))
                return
            async with contextlib.aclosing(behaviour(request, context)) as responses:
                async for response in responses:
                    await context.write(response)

        return grpc.stream_stream_rpc_method_handler(serve, handler.request_deserializer, handler.response_serializer)


def bearer_token(metadata: Any) -> str | None:
    """The token in a call's metadata; None where there is none, or more than one."""
    values = [value for key, value in metadata or () if key == HEADER]
    if len(values) != 1 or not isinstance(values[0], str) or not values[0].startswith(SCHEME):
        return None
    return values[0].removeprefix(SCHEME)
