"""The listener of the HTTP door: uvicorn inside the coordinator's own event loop.

uvicorn's own way to run takes over signals, logging and the end of the process, all of which are the coordinator's
here: this drives its server from start to stop. What a stranger can hold is bounded:

    a request that does not arrive whole           REQUEST_TIMEOUT_S, then its connection is closed
    what is no content: path, headers, trailers    MAX_HEAD_BYTES, then its connection is closed
    a reader that takes nothing, or is gone        UNREAD_TIMEOUT_S after what was sent last (TCP_USER_TIMEOUT)
    a connection without requests                  KEEP_ALIVE_S
    connections                                    MAX_CONNECTIONS; further requests are answered 503
"""

import asyncio
import contextlib
import logging
import socket
import ssl
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from outrider.errors import CertificateError
from outrider.security.tls import TlsConfig

logger = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 60.0
UNREAD_TIMEOUT_S = 60.0
MAX_HEAD_BYTES = 64 << 10
KEEP_ALIVE_S = 75
MAX_CONNECTIONS = 16_384
_BACKLOG = 2_048
_TICK_S = 1.0
# A key with a passphrase is refused rather than asked for at a terminal.
_NO_PASSPHRASE = b""


class HttpServer:
    """One listener, or two; everything they serve is the application's.

    Args:
        shared_port: a second one, on which other processes of this machine and user listen, too.

    Raises:
        OSError: the address cannot be bound.
        CertificateError: a file of `tls` cannot be used.
    """

    def __init__(
        self, app: Any, *, host: str, port: int, shared_port: int | None = None, tls: TlsConfig | None = None
    ) -> None:
        self._certificate = None if tls is None else _DoorCertificate(tls)
        self._sockets = [_listening_socket(host, port)]
        self.address = f"{host}:{self._sockets[0].getsockname()[1]}"
        """host:port with the port that was bound."""
        if shared_port is not None:
            self._sockets.append(_listening_socket(host, shared_port, is_shared=True))
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                http=_Connection,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="error",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                limit_concurrency=MAX_CONNECTIONS,
                backlog=_BACKLOG,
            )
        )
        self._ticking: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """http://HOST:PORT, or https."""
        return f"{'http' if self._certificate is None else 'https'}://{self.address}"

    async def start(self) -> None:
        """Begin to serve."""
        server, config = self._server, self._server.config
        config.load()
        config.ssl = None if self._certificate is None else self._certificate.context
        server.lifespan = config.lifespan_class(config)
        await server.on_tick(0)
        await server.startup(sockets=self._sockets)
        self._ticking = asyncio.create_task(self._tick(), name="http door")
        logger.info("serving HTTP on %s", self.url)

    async def _tick(self) -> None:
        """Update the Date header and check the certificate, about once a second."""
        while True:
            await asyncio.sleep(_TICK_S)
            await self._server.on_tick(0)
            if self._certificate is not None:
                self._certificate.refresh()

    def close_listeners(self) -> None:
        """Accept no more connections: those to a shared port go to the other processes."""
        for listener in self._server.servers:
            listener.close()

    async def stop(self, *, grace_s: float = 1.0) -> None:
        """Close listeners and idle connections; responses that go on get `grace_s`."""
        if self._ticking is None:
            for listening in self._sockets:
                listening.close()
            return
        self._ticking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._ticking
        self.close_listeners()
        connections, tasks = self._server.server_state.connections, self._server.server_state.tasks
        for connection in list(connections):
            connection.shutdown()
        if tasks:
            await asyncio.wait(list(tasks), timeout=grace_s)
        # Whoever serves a stream ends it by itself when its connection is gone.
        for connection in list(connections):
            connection.transport.abort()
        if tasks:
            await asyncio.wait(list(tasks), timeout=grace_s)
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Connection(HttpToolsProtocol):
    """uvicorn's connection, which closes if a request does not arrive whole in time, or never gets to its content.

    The parser bounds neither a path nor headers, and they come before any token is looked at.
    """

    _arrival: asyncio.TimerHandle | None = None
    _head_bytes = 0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._expect_request()

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > MAX_HEAD_BYTES:
            self.transport.abort()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = 0
        self._expect_request()

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._head_bytes = 0

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._head_bytes = 0
        self._forget_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_request()
        super().connection_lost(exc)

    def _expect_request(self) -> None:
        if self._arrival is None:
            self._arrival = self.loop.call_later(REQUEST_TIMEOUT_S, self.transport.abort)

    def _forget_request(self) -> None:
        if self._arrival is not None:
            self._arrival.cancel()
            self._arrival = None


class _DoorCertificate:
    """The coordinator's own certificate, read anew when its files change. Clients need none, as at the gRPC door.

    Attributes:
        context: for the listener; `refresh` changes what its next handshakes show.
    """

    def __init__(self, tls: TlsConfig) -> None:
        assert tls.certificate is not None
        assert tls.key is not None
        self._certificate, self._key = tls.certificate, tls.key
        self.context = _new_context()
        try:
            self._stamps = self._read_stamps()
            self._load(self.context)
        except OSError as error:
            raise CertificateError(f"{self._certificate}, {self._key}: {error}") from error

    def refresh(self) -> None:
        """Reload the files if they have changed; log those that cannot be used, and keep the old ones."""
        try:
            stamps = self._read_stamps()
            if stamps == self._stamps:
                return
            # A context into which only half of a new pair fits would be left broken.
            self._load(_new_context())
            self._load(self.context)
        except OSError as error:
            logger.warning("the TLS files of the HTTP door are not read anew: %s", error)
            return
        self._stamps = stamps
        logger.info("TLS files of the HTTP door read anew: %s, %s", self._certificate, self._key)

    def _load(self, context: ssl.SSLContext) -> None:
        # Its errors are OSErrors, too.
        context.load_cert_chain(self._certificate, self._key, password=_NO_PASSPHRASE)

    def _read_stamps(self) -> list[tuple[int, int]]:
        return [(status.st_mtime_ns, status.st_ino) for status in (self._certificate.stat(), self._key.stat())]


def _new_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context


def _listening_socket(host: str, port: int, *, is_shared: bool = False) -> socket.socket:
    """Bound now, so that a port that is taken ends the start; its connections inherit the options."""
    # The brackets belong to the address as others write it.
    family, kind, protocol, _, address = socket.getaddrinfo(
        host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(UNREAD_TIMEOUT_S * 1e3))
        listener.bind(address)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen on {host}:{port} for HTTP: is the port taken? Choose another one") from error
    return listener
